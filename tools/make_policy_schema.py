"""Writes the JSON Schema of policy files. Run it after a change to the policy's classes; a test compares."""

from __future__ import annotations

import json
from pathlib import Path

import bucketpoint.retention
from bucketpoint.retention.yaml_text import POLICY

SCHEMA_FILE = Path(bucketpoint.retention.__file__).with_name("policy.schema.json")


def schema_text() -> str:
    """Return the content of the schema file: JSON Schema 2020-12 for keys, types and bounds, for editors.

    Rules without effect and unset variables are found only by `from_yaml`.
    """
    title = "A retention policy of bucketpoint"
    draft = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": draft, "title": title, **POLICY.schema()}, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
