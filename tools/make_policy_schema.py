"""Writes the JSON Schema of policy files. Run it after a change to the policy's classes; a test compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bucketpoint.retention
from bucketpoint.retention.policy import POLICY_VERSION
from bucketpoint.retention.setting_types import (
    DURATION,
    LISTED_AT_MOST,
    Duration,
    Either,
    Fields,
    Fraction,
    OneOf,
    Setting,
    Several,
    Shape,
    Text,
    WholeNumber,
)
from bucketpoint.retention.yaml_text import POLICY, Version

SCHEMA_FILE = Path(bucketpoint.retention.__file__).with_name("policy.schema.json")


def schema_text() -> str:
    """Return the content of the schema file: JSON Schema 2020-12 for keys, types and bounds, for editors.

    Rules without effect and unset variables are found only by `from_yaml`.
    """
    title = "A retention policy of bucketpoint"
    draft = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": draft, "title": title, **_schema(POLICY)}, indent=2) + "\n"


def _schema(shape: Shape) -> dict[str, Any]:
    """Return the JSON Schema of the YAML form of a shape."""
    if isinstance(shape, Version):
        return {"const": POLICY_VERSION}
    if isinstance(shape, WholeNumber):
        upper = {} if shape.maximum is None else {"maximum": shape.maximum}
        return {"type": "integer", "minimum": shape.minimum, **upper}
    if isinstance(shape, Fraction):
        return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    if isinstance(shape, Duration):
        zero = "" if shape.zero else r"(?!0+(\.0+)?[smhdw]$)"
        return {"type": "string", "pattern": f"^{zero}{DURATION.pattern}$", "examples": ["90s", "20m", "12h", "7d"]}
    if isinstance(shape, OneOf):
        return {"enum": list(shape.words)}
    if isinstance(shape, Text):
        return {"type": "string", "pattern": f"^(?:{shape.pattern})$"}
    if isinstance(shape, Several):
        once = {"uniqueItems": True, "minItems": 1, "maxItems": LISTED_AT_MOST}
        return {"type": "array", "items": _schema(shape.of), **once}
    if isinstance(shape, Either):
        return {"oneOf": [_schema(Fields(kind)) for kind in shape.kinds]}
    if isinstance(shape, Fields):
        required = [setting.key for setting in shape.settings if setting.required]
        return {
            "type": "object",
            "description": (shape.kind.__doc__ or "").split("\n\n")[0].replace("\n    ", " "),
            "properties": {setting.key: _described(setting) for setting in shape.settings},
            "additionalProperties": False,
            **({"required": required} if required else {}),
        }
    raise NotImplementedError(shape)


def _described(setting: Setting) -> dict[str, Any]:
    schema = {**_schema(setting.shape), "description": setting.doc}
    if setting.required or setting.default is None or isinstance(setting.shape, (Fields, Either)):
        return schema
    return {**schema, "default": setting.shape.plain(setting.default)}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
