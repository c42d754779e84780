"""Writes the JSON Schema of policy files. Run it after a change to the policy's classes; a test compares."""

from __future__ import annotations

from pathlib import Path

import bucketpoint.retention
from bucketpoint.retention.yaml_text import SCHEMA_FILE, schema_text

if __name__ == "__main__":
    Path(bucketpoint.retention.__file__).with_name(SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
