"""Writes the IAM policy of each role into `policies/aws` and `policies/minio`; a test compares."""

from __future__ import annotations

import json
from pathlib import Path

from bucketpoint.cli.commands.doctor import role_policies

POLICIES = Path(__file__).resolve().parent.parent / "policies"


def files() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        POLICIES / service / f"{role}.json": json.dumps(policy, indent=2) + "\n"
        for service in ("aws", "minio")
        for role, policy in role_policies(service=service).items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
