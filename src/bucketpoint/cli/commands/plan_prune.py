"""`bucketpoint plan` and `prune`: commands around the retention engine, the plan's picture and the pruner."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.commands.ls import unrecorded_lines
from bucketpoint.cli.progress_line import progress_option, watched
from bucketpoint.cli.run_options import policy_argument
from bucketpoint.errors import BucketpointError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.prune_report import Pruned
    from bucketpoint.catalog.snapshot import Snapshot
    from bucketpoint.retention import Plan, RetentionPolicy, Verdict


@command("plan")
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False),
    metavar="FILE.svg",
    help="Write a picture of the plan to this SVG file.",
)
@policy_argument
def plan(policy: RetentionPolicy, catalog: Catalog, picture: str | None, as_json: bool) -> CommandResult:
    """Show which checkpoints a policy keeps or deletes, and why.

    Changes nothing in the run. Each kept checkpoint is listed with all its reasons, each deleted one with the rule that
    nearly kept it. Exits with 1 if the circuit breaker (max_delete) would refuse: a prune then carries out only a few
    of the deletions.
    """
    from bucketpoint.catalog.deletion.prune_worker import judged
    from bucketpoint.catalog.survey import survey

    if picture is not None and not picture.endswith(".svg"):
        raise click.BadParameter(f"{picture!r} does not end in .svg, and SVG is the only format", param_hint="--plot")
    snapshot = survey(catalog)
    made, verdict = judged(policy, snapshot.rows())
    judgement = {"allowed": verdict.allowed, "unasked": verdict.unasked, "verdict": verdict.why}
    document = {"root": catalog.url, **made.to_dict(), **judgement, **_beside(policy, catalog, snapshot)}
    # The engine's version of the plan's form, next to the version of the command's document.
    document["plan_version"] = document.pop("version")
    document["plot"] = picture
    if picture is not None:
        _draw(made, catalog.url, picture)
    return CommandResult(document, _plan_lines(made, verdict, document, picture), ok=verdict.allowed)


@command("prune")
@click.option("--dry-run", is_flag=True, help="Show the plan, and change nothing.")
@click.option("--yes", is_flag=True, help="Carry out the whole plan, even if the circuit breaker (max_delete) refuses.")
@progress_option
@policy_argument
def prune(
    policy: RetentionPolicy, catalog: Catalog, dry_run: bool, yes: bool, progress: bool | None, as_json: bool
) -> CommandResult:
    """Carry out a policy once: write tombstones, delete what is due.

    Checkpoints that the policy deletes or thins get a tombstone first, and go once their grace period is over. Safe
    from any machine and during a training that saves: only one pruner runs at a time, and checkpoints that are pinned
    or read meanwhile stay. Exits with 1 if the circuit breaker refuses all but a few deletions, if nothing could be
    done, or if a delete failed.
    """
    from bucketpoint.catalog.deletion.lock import holder_name
    from bucketpoint.catalog.deletion.prune_worker import judged, prune_by
    from bucketpoint.catalog.survey import survey

    # Survey before the lock is written: writing the lock would create a mistyped root.
    snapshot = survey(catalog)
    others = _unrecorded(catalog, snapshot)
    if dry_run:
        made, verdict = judged(policy, snapshot.rows())
        judgement = {"dry_run": True, **_counts(made), "verdict": verdict.why}
        document = {"root": catalog.url, **judgement, **_beside(policy, catalog, snapshot)}
        return CommandResult(document, _plan_lines(made, verdict, document), ok=verdict.allowed or yes)
    with watched(catalog, progress) as at:
        done = prune_by(at, policy, holder=holder_name(), force=yes)
    refused = done.verdict is not None and not done.verdict.allowed and not yes
    document = {
        "root": catalog.url,
        "dry_run": False,
        "stopped": done.done.stopped,
        "verdict": done.verdict.why if done.verdict is not None else None,
        **_done(done.done),
        "unrecorded": others,
    }
    fine = done.done.stopped is None and not refused and not done.done.failures
    return CommandResult(document, _done_lines(document, refused=refused), ok=fine)


def _counts(made: Plan) -> dict[str, Any]:
    return dict(made.to_dict()["summary"])


def _draw(made: Plan, root: str, picture: str) -> None:
    from bucketpoint.cli.plot import svg

    try:
        Path(picture).write_text(svg(made, root), encoding="utf-8")
    except OSError as error:
        raise BucketpointError(
            f"The picture cannot be written: {error}",
            url=picture,
            remedy="Name a file in a folder that exists and is writable",
        ) from error


def _unrecorded(catalog: Catalog, snapshot: Snapshot) -> list[str]:
    return [catalog.url_of_folder(one.folder) for one in snapshot.unrecorded]


def _beside(policy: RetentionPolicy, catalog: Catalog, snapshot: Snapshot) -> dict[str, Any]:
    """Return the checkpoints outside of all rules: those with a tombstone, and those without a record."""
    rows = {(row.step, row.id) for row in snapshot.rows()}
    known = {(one.folder, one.id): one for one in snapshot.recorded}
    now = catalog.clock()
    waiting = [
        {
            "step": one.step,
            "token": one.id,
            "action": one.action,
            "due": one.due,
            "is_due": one.begun or one.due <= now,
            "bytes": sum(known[one.folder, one.id].groups.values()),
        }
        for one in snapshot.notes.tombstones
        if not one.undone and (one.folder, one.id) in known and (one.step, one.id) not in rows
    ]
    return {
        "grace_s": policy.prune.grace.total_seconds(),
        "waiting": waiting,
        "unrecorded": _unrecorded(catalog, snapshot),
    }


def _plan_lines(made: Plan, verdict: Verdict, document: dict[str, Any], picture: str | None = None) -> Iterator[str]:
    for one in made.entries:
        why = "; ".join(map(str, one.reasons)) if one.action == "keep" else str(one.miss)
        yield f"{one.action:<7}step {one.row.step}  {text.size(one.row.bytes)}  {why}"
    for one in document["waiting"]:
        when = "at the next prune" if one["is_due"] else f"after {text.when(one['due'])}"
        yield f"{one['action']:<7}step {one['step']}  {text.size(one['bytes'])}  has a tombstone, is due {when}"
    from bucketpoint.retention.setting_types import written

    kept, thinned, deleted = len(made.kept), len(made.thinned), len(made.deleted)
    grace = written(timedelta(seconds=document["grace_s"]))
    later = f", {grace} after they get a tombstone" if document["grace_s"] and (thinned or deleted) else ""
    yield f"{kept} kept, {thinned} thinned, {deleted} deleted: {text.size(made.freed_bytes)} freed{later}"
    due = [one["bytes"] for one in document["waiting"] if one["is_due"] and one["action"] == "delete"]
    if due:
        which = text.count(len(due), "checkpoint")
        yield f"the tombstones of {which} are due: the next prune frees {text.size(sum(due))}"
    yield from unrecorded_lines(document["root"], len(document["unrecorded"]))
    if picture is not None:
        yield f"picture written to {picture}"
    if not verdict.allowed:
        yield (
            f"REFUSED: {verdict.why}, so `prune` would delete or thin only {verdict.unasked} of them. If the plan is "
            "right, `prune --yes` carries out all of it"
        )


def _done(done: Pruned) -> dict[str, Any]:
    def named(ones: list[tuple[int, str]]) -> list[dict[str, Any]]:
        return [{"step": step, "token": token} for step, token in ones]

    return {
        "tombstones": named(done.buried),
        "deleted": named(done.deleted),
        "thinned": named(done.thinned),
        "withdrawn": named(done.withdrawn),
        "refused": [{"step": step, "token": token, "why": why} for (step, token), why in done.refused.items()],
        "failures": [{"key": one.key, "code": one.code, "message": one.message} for one in done.failures],
    }


def _done_lines(document: dict[str, Any], *, refused: bool) -> Iterator[str]:
    if document["stopped"] is not None:
        yield f"nothing was pruned: {document['stopped']}"
        return
    if refused:
        yield (
            f"REFUSED: {document['verdict']}, so this prune is limited to a few checkpoints. `bucketpoint plan` shows "
            "the whole plan; `bucketpoint prune --yes` carries it out"
        )
    told = {
        "tombstones": "got a tombstone",
        "deleted": "deleted",
        "thinned": "thinned to its weights",
        "withdrawn": "lost its tombstone, because it is held or was saved again",
    }
    quiet = True
    for name, words in told.items():
        for one in document[name]:
            quiet = False
            yield f"step {one['step']} {words}"
    for one in document["refused"]:
        quiet = False
        yield f"step {one['step']} was not deleted: {one['why']}"
    for one in document["failures"]:
        quiet = False
        yield f"not deleted: {one['key']} ({one['code']} {one['message']}); the next prune tries it again"
    if quiet and not refused:
        yield "nothing to do"
    yield from unrecorded_lines(document["root"], len(document["unrecorded"]))
