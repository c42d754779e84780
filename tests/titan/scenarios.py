"""What tests have looked at in a process where torchtitan is imported."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from bucketpoint.integrations.torchtitan import POLICY_VARIABLE, _policy_of
from titan.cpu import BucketpointManager


def policies(configs: list[dict[str, Any]], variable: str | None = None) -> list[dict[str, Any]]:
    """The policies that options of torchtitan's stand for."""
    os.environ.pop(POLICY_VARIABLE, None)
    if variable is not None:
        os.environ[POLICY_VARIABLE] = variable
    return [asdict(_policy_of(BucketpointManager.Config(enable=True, **config))) for config in configs]
