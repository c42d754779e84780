"""Writes the IAM policy of each role into `policies/aws` and `policies/minio`. Run it after a change; a test compares.

Standard library only: any Python 3.10+ runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

POLICIES = Path(__file__).resolve().parent.parent / "policies"

# S3 answers 404 for a missing key only to a role that may list the bucket, and a GET names no prefix: without
# IfExists a condition on the prefix would refuse it, and S3 would answer 403. MinIO has no IfExists and answers 404.
OPERATORS = {"aws": "StringLikeIfExists", "minio": "StringLike"}
"""The operator of a condition on the prefix, by the service that reads the policy."""

OBJECTS = "arn:aws:s3:::BUCKET/PREFIX"
"""Every key below the prefix of one team's runs. BUCKET and PREFIX are for whoever uses a policy to replace."""

NOTES = (f"{OBJECTS}/_bucketpoint/*", f"{OBJECTS}/*/_bucketpoint/*")
"""Keys of catalogs: records, tombstones, leases, pins."""


def statement(sid: str, actions: tuple[str, ...], resources: tuple[str, ...]) -> dict[str, Any]:
    """Return a statement that allows the actions."""
    return {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}


def roles(service: str) -> dict[str, dict[str, Any]]:
    """Return the policy of each role, as `service` reads it: `aws` or `minio`."""
    find_checkpoints = {
        **statement("FindCheckpoints", ("s3:ListBucket",), ("arn:aws:s3:::BUCKET",)),
        "Condition": {OPERATORS[service]: {"s3:prefix": ["PREFIX/*"]}},
    }
    statements = {
        "trainer": [
            statement("SaveAndLoad", ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"), (f"{OBJECTS}/*",)),
            statement("TidyNotes", ("s3:DeleteObject",), NOTES),
            find_checkpoints,
        ],
        "reader": [
            statement("Load", ("s3:GetObject",), (f"{OBJECTS}/*",)),
            find_checkpoints,
        ],
        "pruner": [
            statement("Delete", ("s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"), (f"{OBJECTS}/*",)),
            statement("KeepNotesAndThin", ("s3:PutObject",), (*NOTES, f"{OBJECTS}/*/.metadata")),
            find_checkpoints,
            # No condition on a prefix applies to this action.
            statement("FindDebris", ("s3:ListBucketMultipartUploads",), ("arn:aws:s3:::BUCKET",)),
        ],
    }
    return {role: {"Version": "2012-10-17", "Statement": found} for role, found in statements.items()}


def files() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        POLICIES / service / f"{role}.json": json.dumps(policy, indent=2) + "\n"
        for service in OPERATORS
        for role, policy in roles(service).items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
