"""The JSON Schema of policy files, made from the classes that read them. Editors use `policy.schema.json`."""

from __future__ import annotations

import json
from typing import Any

from bucketpoint.retention.yaml_text import POLICY

SCHEMA_FILE = "policy.schema.json"


def policy_schema() -> dict[str, Any]:
    """Return the schema of policy files, as JSON Schema 2020-12.

    It covers keys, types and bounds. Unreachable rules and variables that are not set are found by reading the policy.
    """
    title = "A retention policy of bucketpoint"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **POLICY.schema()}


def schema_text() -> str:
    """Return the schema as the text of the schema file."""
    return json.dumps(policy_schema(), indent=2) + "\n"
