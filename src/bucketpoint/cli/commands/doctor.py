"""`bucketpoint doctor`: command around `doctor.examine`, and with `--chaos` around `doctor.chaos`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, command, say, store_options
from bucketpoint.cli.option_types import ByteCount

if TYPE_CHECKING:
    from bucketpoint.doctor.bucket import Finding
    from bucketpoint.doctor.chaos import ChaosReport
    from bucketpoint.doctor.examine import Diagnosis

_COLUMN = 20


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
@store_options
def doctor(
    url: str, size: int, role: str, chaos: bool, seed: int, saves: int, access: Access, as_json: bool
) -> CommandResult:
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
    told = (lambda finding: None) if as_json else _tell
    found = examine(store, prefix, role=role, probe_bytes=size, told=told)
    counts = {status: sum(one.status == status for one in found.findings) for status in ("ok", "warn", "fail", "skip")}
    verdict = f"{'fit' if found.ok else 'NOT fit'} for {'checkpoints' if role == 'admin' else f'a {role}'}"
    last = f"{url} is {verdict}: {text.count(counts['warn'], 'warning')}, {text.count(counts['fail'], 'failure')}"
    document = {"url": url, "role": role, "counts": counts, "left": list(found.left), **_document(found)}
    if not chaos:
        return CommandResult(document, [last], found.ok)
    if not as_json:
        say(last)
    if not found.ok:
        return CommandResult(
            {**document, "chaos": None},
            ["--chaos was not run, because saves fail here even without injected faults"],
            False,
        )
    if any(one.check == "delete" and one.status != "ok" for one in found.findings):
        return CommandResult(
            {**document, "chaos": None},
            ["--chaos was not run, because its checkpoints could not be deleted here"],
            False,
        )
    report = _trial(url, seed, saves, access, quiet=as_json)
    return CommandResult({**document, "chaos": _told(report)}, _chaos_lines(report), report.ok)


def _trial(url: str, seed: int, saves: int, access: Access, *, quiet: bool) -> ChaosReport:
    import logging

    from bucketpoint.doctor.chaos import chaos

    # Errors caused by faults are counted in the report; DCP would also print a traceback for each of them.
    logging.disable(logging.ERROR)
    try:
        told = (lambda line: None) if quiet else (lambda line: say(f"     {line}"))
        return chaos(url, storage_options=access.for_url(url), seed=seed, saves=saves, told=told)
    finally:
        logging.disable(logging.NOTSET)


def _told(report: ChaosReport) -> dict[str, Any]:
    return {
        "seed": report.seed,
        "requests": report.requests,
        "faults": dict(report.faults),
        "committed": report.committed,
        "refused": dict(report.refused),
        "loaded": report.loaded,
        "failed_loads": dict(report.failed_loads),
        "losses": report.losses,
        "left": report.left,
    }


def _chaos_lines(report: ChaosReport) -> list[str]:
    faults, refused = report.faults.total(), report.refused.total()
    failed = report.failed_loads.total()
    lines = [f"{text.count(faults, 'fault')} in {text.count(report.requests, 'request')}, seed {report.seed}:"]
    lines += [f"  {count:4}  {name}" for name, count in report.faults.most_common()]
    lines.append(f"{text.count(report.committed, 'save')} committed, {refused} raised an error")
    lines.append(f"{text.count(report.loaded, 'load')} returned the saved state, {failed} raised an error")
    lines += [f"LOST: {one}" for one in report.losses]
    if report.left:
        lines.append(f"{text.count(len(report.left), 'object')} could not be deleted, such as {report.left[0]}")
    return [*lines, "no checkpoint was lost" if report.ok else f"lost: {text.count(len(report.losses), 'checkpoint')}"]


def _tell(finding: Finding) -> None:
    """Print a finding at once, since the throughput probe may take a while."""
    say(f"{finding.status:<5}{finding.check:<{_COLUMN}}{finding.message}")
    if finding.remedy and finding.status in ("warn", "fail"):
        say(f"{'':<{5 + _COLUMN}}{finding.remedy}")


def _document(found: Diagnosis) -> dict[str, Any]:
    findings = [
        {"check": one.check, "status": one.status, "message": one.message, "remedy": one.remedy}
        for one in found.findings
    ]
    if found.speed is None:
        return {"findings": findings, "throughput": None}
    advised = found.speed.advice(0)
    return {
        "findings": findings,
        "throughput": {
            "latency_s": found.speed.latency_s,
            "moved_bytes": found.speed.moved_bytes,
            "levels": [
                {"connections": level.connections, "up": level.up, "down": level.down} for level in found.speed.levels
            ],
            "part_bytes": advised.part_bytes,
            "connections": advised.connections,
        },
    }
