"""`bucketpoint doctor`: command around `doctor.examine`, and the IAM policies of trainers, readers and pruners.

The files in `policies/` have the same policies.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, as_json, command, say
from bucketpoint.cli.options import ByteCount

if TYPE_CHECKING:
    from bucketpoint.doctor.examine import Diagnosis
    from bucketpoint.doctor.report import Finding

_COLUMN = 20
_STATUSES = ("ok", "warn", "fail", "skip")


@command("doctor")
@click.argument("url")
@click.option(
    "--size",
    type=ByteCount(),
    metavar="SIZE",
    default="128MiB",
    show_default=True,
    help="Number of bytes to upload and to download when measuring throughput. 0: do not measure.",
)
@click.option(
    "--role",
    type=click.Choice(["admin", "trainer", "reader", "pruner"]),
    default="admin",
    show_default=True,
    help="Role of the credentials. Only requests that this role needs are tried, and only refusals of those are "
    "failures. admin: saves, loads and prunes.",
)
@click.option("--iam", is_flag=True, help="Print the IAM policy that --role needs at an s3:// URL, and try nothing.")
def doctor(url: str, size: int, role: str, iam: bool, access: Access) -> CommandResult:
    """Check that a bucket or folder is fit for checkpoints.

    Also measures throughput and names the best settings. Tries, below URL, the requests of saves, loads and pruning:
    rights, conditional writes, multipart uploads, throughput. Reads the bucket's versioning and lifecycle rules, and
    compares clocks. Deletes the objects that it wrote. Without the right to delete, one object of a few bytes stays,
    and is named. Exits with 1 if anything failed.
    """
    from bucketpoint.doctor.examine import examine

    if iam:
        return _policy(url, role, access)
    diagnosis = examine(*access.at(url).opened, role=role, probe_bytes=size, told=_tell)
    counts = {status: sum(finding.status == status for finding in diagnosis.findings) for status in _STATUSES}
    verdict = f"{'fit' if diagnosis.ok else 'NOT fit'} for {'checkpoints' if role == 'admin' else f'a {role}'}"
    last = f"{url} is {verdict}: {text.count(counts['warn'], 'warning')}, {text.count(counts['fail'], 'failure')}"
    document = {"url": url, "role": role, "counts": counts, "left": list(diagnosis.left), **_document(diagnosis)}
    return CommandResult(document, [last], diagnosis.ok)


def _policy(url: str, role: str, access: Access) -> CommandResult:
    from bucketpoint.stores.s3 import S3Store
    from bucketpoint.stores.s3.inspect import partition

    store, prefix = access.at(url).opened
    if not isinstance(store, S3Store):
        raise click.BadParameter("only s3:// URLs have IAM policies", param_hint="URL")
    policies = role_policies(store.bucket, prefix, service=store.service.name, partition=partition(store))
    if role not in policies:
        raise click.BadParameter(f"--iam needs one of {', '.join(policies)}", param_hint="--role")
    document = {"url": url, "role": role, "policy": policies[role]}
    return CommandResult(document, json.dumps(policies[role], indent=2).splitlines())


def _tell(finding: Finding) -> None:
    """Print a finding at once, since the rest may take a while."""
    if as_json():
        return
    say(f"{finding.status:<5}{finding.check:<{_COLUMN}}{finding.message}")
    if finding.remedy and finding.status in ("warn", "fail"):
        say(f"{'':<{5 + _COLUMN}}{finding.remedy}")


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    throughput = None
    if diagnosis.speed is not None:
        advised = diagnosis.speed.advice()
        throughput = {
            "latency_s": diagnosis.speed.latency_s,
            "moved_bytes": diagnosis.speed.moved_bytes,
            "levels": [vars(level) for level in diagnosis.speed.levels],
            "part_bytes": advised.part_bytes,
            "connections": advised.connections,
        }
    return {"findings": [vars(finding) for finding in diagnosis.findings], "throughput": throughput}


# -- IAM policies ------------------------------------------------------------------------------------------------------

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
