"""`bucketpoint doctor`: command around `doctor.examine`."""

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
    from bucketpoint.doctor.policies import role_policies
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
