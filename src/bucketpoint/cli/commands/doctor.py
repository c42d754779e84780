"""`bucketpoint doctor`: command around `doctor.examine`, and with `--chaos` around `doctor.chaos`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, as_json, command, say
from bucketpoint.cli.options import ByteCount

if TYPE_CHECKING:
    from bucketpoint.doctor.chaos import ChaosReport
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
@click.option(
    "--chaos",
    is_flag=True,
    help="Also save and load below URL while requests are made to fail on purpose (S3 and GCS).",
)
@click.option("--seed", type=int, default=0, show_default=True, help="With --chaos: random seed of the faults.")
@click.option(
    "--saves",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="With --chaos: number of saves, about 5 MiB each.",
)
def doctor(url: str, size: int, role: str, chaos: bool, seed: int, saves: int, access: Access) -> CommandResult:
    """Check that a bucket or folder is fit for checkpoints.

    Also measures throughput and names the best settings. Tries, below URL, the requests of saves, loads and pruning:
    rights, conditional writes, multipart uploads, throughput. Reads the bucket's versioning and lifecycle rules, and
    compares clocks. Deletes the objects that it wrote. Without the right to delete, one object of a few bytes stays,
    and is named. Exits with 1 if anything failed, or if --chaos lost anything.
    """
    from bucketpoint.doctor.examine import examine
    from bucketpoint.stores import open_store

    if chaos and role != "admin":
        raise click.UsageError("--chaos needs the role admin, because it saves, loads and deletes: leave out --role")
    store, prefix = open_store(url.rstrip("/") or url, storage_options=access.for_url(url))
    diagnosis = examine(store, prefix, role=role, probe_bytes=size, told=_tell)
    counts = {status: sum(finding.status == status for finding in diagnosis.findings) for status in _STATUSES}
    verdict = f"{'fit' if diagnosis.ok else 'NOT fit'} for {'checkpoints' if role == 'admin' else f'a {role}'}"
    last = f"{url} is {verdict}: {text.count(counts['warn'], 'warning')}, {text.count(counts['fail'], 'failure')}"
    document = {"url": url, "role": role, "counts": counts, "left": list(diagnosis.left), **_document(diagnosis)}
    if not chaos:
        return CommandResult(document, [last], diagnosis.ok)
    reason = None
    if not diagnosis.ok:
        reason = "saves fail here even without injected faults"
    elif any(finding.check == "delete" and finding.status != "ok" for finding in diagnosis.findings):
        reason = "its checkpoints could not be deleted here"
    if reason is not None:
        return CommandResult({**document, "chaos": None}, [last, f"--chaos was not run, because {reason}"], False)
    _say_now(last)
    report = _trial(url, seed, saves, access)
    return CommandResult({**document, "chaos": vars(report)}, _chaos_lines(report), report.ok)


def _trial(url: str, seed: int, saves: int, access: Access) -> ChaosReport:
    import logging

    from bucketpoint.doctor.chaos import chaos

    # Errors caused by faults are counted in the report; DCP would also print a traceback for each of them.
    logging.disable(logging.ERROR)
    try:
        options = access.for_url(url)
        return chaos(url, storage_options=options, seed=seed, saves=saves, told=lambda line: _say_now(f"     {line}"))
    finally:
        logging.disable(logging.NOTSET)


def _chaos_lines(report: ChaosReport) -> list[str]:
    faults, refused = report.faults.total(), report.refused.total()
    failed = report.failed_loads.total()
    lines = [f"{text.count(faults, 'fault')} in {text.count(report.requests, 'request')}, seed {report.seed}:"]
    lines += [f"  {count:4}  {name}" for name, count in report.faults.most_common()]
    lines.append(f"{text.count(report.committed, 'save')} committed, {refused} raised an error")
    lines.append(f"{text.count(report.loaded, 'load')} returned the saved state, {failed} raised an error")
    lines += [f"LOST: {loss}" for loss in report.losses]
    if report.left:
        lines.append(f"{text.count(len(report.left), 'object')} could not be deleted, such as {report.left[0]}")
    return [*lines, "no checkpoint was lost" if report.ok else f"lost: {text.count(len(report.losses), 'checkpoint')}"]


def _say_now(line: str) -> None:
    """Print a line of text at once, since the rest may take a while."""
    if not as_json():
        say(line)


def _tell(finding: Finding) -> None:
    _say_now(f"{finding.status:<5}{finding.check:<{_COLUMN}}{finding.message}")
    if finding.remedy and finding.status in ("warn", "fail"):
        _say_now(f"{'':<{5 + _COLUMN}}{finding.remedy}")


def _document(diagnosis: Diagnosis) -> dict[str, Any]:
    throughput = None
    if diagnosis.speed is not None:
        advised = diagnosis.speed.advice(0)
        throughput = {
            "latency_s": diagnosis.speed.latency_s,
            "moved_bytes": diagnosis.speed.moved_bytes,
            "levels": [vars(level) for level in diagnosis.speed.levels],
            "part_bytes": advised.part_bytes,
            "connections": advised.connections,
        }
    return {"findings": [vars(finding) for finding in diagnosis.findings], "throughput": throughput}
