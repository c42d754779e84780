"""The JSON Schema of policy files, made from the classes that read them. Editors use `policy.schema.json`."""

from __future__ import annotations

import json
from typing import Any

from bucketpoint.retention.policy import POLICY_VERSION, RetentionPolicy
from bucketpoint.retention.setting_types import Fields

SCHEMA_FILE = "policy.schema.json"


def policy_schema() -> dict[str, Any]:
    """Return the schema of policy files, as JSON Schema 2020-12.

    It covers keys, types and bounds. Unreachable rules and variables that are not set are found by reading the policy.
    """
    policy = Fields(RetentionPolicy).schema()
    version = {"const": POLICY_VERSION, "description": "of the policy's format"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A retention policy of bucketpoint",
        **policy,
        "properties": {"version": version, **policy["properties"]},
        "required": ["version", *policy["required"]],
    }


def schema_text() -> str:
    """Return the schema as the text of the schema file."""
    return json.dumps(policy_schema(), indent=2) + "\n"
