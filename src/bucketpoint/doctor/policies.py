"""IAM policies of the roles trainer, reader and pruner, for `doctor --iam` and the files in `policies/`."""

from __future__ import annotations

from typing import Any

BUCKET, PREFIX = "BUCKET", "PREFIX"
"""Placeholders in the files of `policies/`, to be replaced by their users."""

# S3 answers 404 for a missing key only to a role that may list the bucket. A GET has no prefix: without IfExists the
# condition on the prefix fails, and S3 answers 403. MinIO has no IfExists, and always answers 404.
_OPERATORS = {"aws": "StringLikeIfExists"}

# The settings of the bucket that `doctor` reads.
_SETTINGS = ("s3:GetBucketVersioning", "s3:GetBucketObjectLockConfiguration", "s3:GetLifecycleConfiguration")


def role_policies(
    bucket: str = BUCKET, prefix: str = PREFIX, *, service: str = "aws", partition: str = "aws"
) -> dict[str, dict[str, Any]]:
    """Return the policy of each role.

    Args:
        bucket: name of the bucket, or ARN of an access point as `parse_url` returns it.
        prefix: prefix of all runs of one team; empty for the whole bucket.
        service: name of the S3 service that reads the policy.
        partition: the partition of the ARNs, such as `aws-cn`.
    """
    below = f"{prefix}/" if prefix else ""
    if bucket.endswith("--x-s3"):
        # A directory bucket has no permissions for prefixes, and none for single actions.
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-security-iam-identity-policies.html
        resource = f"arn:{partition}:s3express:*:*:bucket/{bucket}"
        session = _allowed("OpenSession", ("s3express:CreateSession",), (resource,))
        read_only = {**session, "Condition": {"StringEquals": {"s3express:SessionMode": "ReadOnly"}}}
        statements = {"trainer": [session], "reader": [read_only], "pruner": [session]}
    else:
        point = bucket.startswith("arn:")
        place = bucket.replace(":accesspoint:", ":accesspoint/") if point else f"arn:{partition}:s3:::{bucket}"
        objects = f"{place}/object/{below}" if point else f"{place}/{below}"
        statements = _statements(place, objects, {_OPERATORS.get(service, "StringLike"): {"s3:prefix": [f"{below}*"]}})
    return {role: {"Version": "2012-10-17", "Statement": found} for role, found in statements.items()}


def _statements(place: str, objects: str, prefixed: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    # Keys of catalogs: records, tombstones, leases, pins.
    notes = (f"{objects}_bucketpoint/*", f"{objects}*/_bucketpoint/*")
    data = f"{objects}*"
    find_checkpoints = {**_allowed("FindCheckpoints", ("s3:ListBucket",), (place,)), "Condition": prefixed}
    examine = _allowed("ExamineBucket", _SETTINGS, (place,))
    return {
        "trainer": [
            # A server-side copy of an object with tags needs the permission to read the tags.
            _allowed(
                "SaveAndLoad",
                ("s3:GetObject", "s3:GetObjectTagging", "s3:PutObject", "s3:AbortMultipartUpload"),
                (data,),
            ),
            _allowed("TidyNotes", ("s3:DeleteObject",), notes),
            find_checkpoints,
            examine,
        ],
        "reader": [_allowed("Load", ("s3:GetObject",), (data,)), find_checkpoints],
        "pruner": [
            _allowed("Delete", ("s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"), (data,)),
            _allowed("KeepNotesAndThin", ("s3:PutObject",), (*notes, f"{objects}*/.metadata")),
            find_checkpoints,
            # No condition on a prefix applies to this action.
            _allowed("FindDebris", ("s3:ListBucketMultipartUploads",), (place,)),
            examine,
        ],
    }


def _allowed(sid: str, actions: tuple[str, ...], resources: tuple[str, ...]) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": list(resources)}
