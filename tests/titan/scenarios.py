"""What tests have looked at where torchtitan is imported, which is not in the process of the tests."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any


def policies(configs: list[dict[str, Any]], variable: str | None = None) -> list[dict[str, Any]]:
    """The policies that options of torchtitan's stand for."""
    from bucketpoint.catalog.policy_file import POLICY_VARIABLE
    from bucketpoint.integrations.torchtitan import _policy_of
    from titan.cpu import BucketpointManager

    os.environ.pop(POLICY_VARIABLE, None)
    if variable is not None:
        os.environ[POLICY_VARIABLE] = variable
    return [asdict(_policy_of(BucketpointManager.Config(enable=True, **config))) for config in configs]


def refusal(config: dict[str, Any]) -> str:
    """What is wrong with options of torchtitan's, by the error that they are refused with."""
    from titan.cpu import BucketpointManager

    try:
        BucketpointManager.Config(enable=True, **config)
    except ValueError as error:
        return str(error)
    return ""
