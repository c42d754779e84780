"""`bucketpoint prune`: command around the retention engine, the plan's picture and the pruner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command, write_file
from bucketpoint.cli.commands.ls import unrecorded_lines
from bucketpoint.cli.options import policy_argument, progress_option, run_arguments
from bucketpoint.cli.text import watched

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.snapshot import Snapshot
    from bucketpoint.retention import Entry, Plan, RetentionPolicy, Row, Verdict

_OUTCOMES = {
    "tombstones": "got a tombstone",
    "deleted": "deleted",
    "thinned": "thinned to its weights",
    "withdrawn": "lost its tombstone, because the policy keeps it, it is held, or it was saved again",
}


@command("prune")
@click.option("--dry-run", is_flag=True, help="Show what would be kept and deleted, and why. Change nothing.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False),
    metavar="FILE.svg",
    help="With --dry-run: write a picture of the plan to this SVG file.",
)
@click.option("--yes", is_flag=True, help="Carry out the whole plan, even if the circuit breaker (max_delete) refuses.")
@progress_option
@policy_argument
def prune(
    policy: RetentionPolicy, catalog: Catalog, dry_run: bool, picture: str | None, yes: bool, progress: bool | None
) -> CommandResult:
    """Carry out a policy once, or show with --dry-run what it decides.

    Checkpoints that the policy deletes or thins get a tombstone first, and are deleted or thinned after their grace
    period. Safe from any machine and during a training that saves: only one pruner runs at a time, and checkpoints that
    are pinned or read meanwhile stay. With --dry-run each kept checkpoint is listed with all its reasons, each deleted
    one with the rule that nearly kept it. Exits with 1 if the circuit breaker refuses all but a few deletions, if
    nothing could be done, or if a delete failed.
    """
    from bucketpoint.catalog.deletion.prune import prune_by
    from bucketpoint.catalog.records import process_name
    from bucketpoint.catalog.run import survey

    if picture is not None and not (dry_run and picture.endswith(".svg")):
        raise click.BadParameter("pass --dry-run, and a file that ends in .svg, the only format", param_hint="--plot")
    # Survey before the lock is written: writing the lock would create a mistyped root.
    snapshot = survey(catalog)
    if dry_run:
        return _dry_run(policy, catalog, snapshot, picture, forced=yes)
    with watched(catalog, progress) as at:
        done = prune_by(at, policy, holder=process_name(), force=yes)
    pruned = done.done
    refused = done.verdict is not None and not done.verdict.allowed and not yes
    document = {
        "root": catalog.url,
        "dry_run": False,
        "stopped": pruned.stopped,
        "verdict": done.verdict.why if done.verdict is not None else None,
        "tombstones": _named(pruned.buried),
        "deleted": _named(pruned.deleted),
        "thinned": _named(pruned.thinned),
        "withdrawn": _named(pruned.withdrawn),
        "refused": [{"step": step, "token": token, "why": why} for (step, token), why in pruned.refused.items()],
        "failures": [vars(failure) for failure in pruned.failures],
        **_notices(policy, catalog, snapshot),
        "gone": pruned.gone,
    }
    fine = pruned.stopped is None and not refused and not pruned.failures
    return CommandResult(document, _done_lines(document, refused=refused), ok=fine)


def _dry_run(
    policy: RetentionPolicy, catalog: Catalog, snapshot: Snapshot, picture: str | None, *, forced: bool
) -> CommandResult:
    """Make the plan that a prune would make. One HEAD for each checkpoint that stays shows whether it still exists."""
    from bucketpoint.catalog.deletion.prune import existing, judged

    def decide(rows: Sequence[Row]) -> list[Entry]:
        return [entry for entry in judged(policy, rows)[0].entries if entry.action != "keep"]

    snapshot, _ = existing(catalog, snapshot, decide, dry_run=True)
    planned, verdict = judged(policy, snapshot.rows())
    document = {"root": catalog.url, "dry_run": True, **planned.to_dict(), "plot": picture}
    # Version of the plan's format, beside the version of the command's document.
    document["plan_version"] = document.pop("version")
    document |= document["summary"]
    document |= {"allowed": verdict.allowed, "unasked": verdict.unasked, "verdict": verdict.why}
    document |= beside_plan(policy, catalog, snapshot, planned)
    if picture is not None:
        from bucketpoint.cli.svg import plan_picture

        write_file(picture, plan_picture(planned, catalog.url), "picture")
    return CommandResult(document, _plan_lines(planned, verdict, document), ok=verdict.allowed or forced)


def _named(checkpoints: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"step": step, "token": token} for step, token in checkpoints]


def _notices(policy: RetentionPolicy, catalog: Catalog, snapshot: Snapshot) -> dict[str, Any]:
    """Return fields that explain a plan: checkpoints that it does not decide on, and clocks that were ahead."""
    from bucketpoint.catalog.deletion.prune import future_lines, missing_metrics

    return {
        "gone": sorted(checkpoint.step for checkpoint in snapshot.gone),
        "future": list(future_lines(snapshot.ahead)),
        "arguments": run_arguments(catalog),
        "unrecorded": [catalog.url_of_folder(saved.folder) for saved in snapshot.unrecorded],
        "unrecorded_steps": [saved.step for saved in snapshot.unrecorded],
        "unreported": missing_metrics(policy, snapshot.rows(), snapshot.metric_names()),
    }


def beside_plan(policy: RetentionPolicy, catalog: Catalog, snapshot: Snapshot, plan: Plan) -> dict[str, Any]:
    """Return the fields shown with a plan: waiting tombstones, tombstones that a prune withdraws, and notices."""
    fates = {entry.row.name: entry.action for entry in plan.entries}
    spared = snapshot.spared(fates)
    sizes = {(record.folder, record.id): sum(record.groups.values()) for record in snapshot.recorded}
    # For display: the later of this machine's clock and the newest object's time. A prune uses the store's clock.
    now = max(catalog.clock(), snapshot.taken or 0.0)
    waiting = [
        {
            "step": note.step,
            "token": note.id,
            "action": note.action,
            "due": note.due,
            "is_due": note.begun or note.is_due(now),
            "bytes": sizes[note.folder, note.id],
        }
        for note in snapshot.notes.tombstones
        if (note.folder, note.id) in sizes
        # A tombstone has no effect while, for example, a pin or a lease keeps its checkpoint.
        and (note.begun or fates.get((note.step, note.id), note.action) == note.action)
    ]
    return {
        "grace_s": policy.prune.grace.total_seconds(),
        "waiting": waiting,
        "withdrawn": _named((note.step, note.id) for note in spared),
        **_notices(policy, catalog, snapshot),
    }


def _plan_lines(plan: Plan, verdict: Verdict, document: dict[str, Any]) -> Iterator[str]:
    from bucketpoint.retention.setting_types import written

    waiting = {(note["step"], note["token"], note["action"]): note for note in document["waiting"]}
    withdrawn = {(one["step"], one["token"]) for one in document["withdrawn"]}
    ordered = 0
    for entry in plan.entries:
        row = entry.row
        why = "; ".join(map(str, entry.reasons)) if entry.action == "keep" else str(entry.miss)
        if note := waiting.pop((row.step, row.id, entry.action), None):
            why = f"{_due(note)}: {why}"
            ordered += 1
        elif row.name in withdrawn:
            why += "; a prune withdraws its tombstone"
        yield f"{entry.action:<7}step {row.step}  {text.size(row.bytes)}  {why}"
    for note in waiting.values():
        why = f"{_due(note)}, regardless of the policy"
        yield f"{note['action']:<7}step {note['step']}  {text.size(note['bytes'])}  {why}"
    others = [note["bytes"] for note in waiting.values() if note["action"] == "delete"]
    kept, thinned, deleted = len(plan.kept), len(plan.thinned), len(plan.deleted) + len(others)
    grace, ordered = written(timedelta(seconds=document["grace_s"])), ordered + len(others)
    later = f", {grace} after they get a tombstone" if document["grace_s"] and thinned + deleted > ordered else ""
    if ordered:
        all_of_them = "it has" if ordered == 1 else "all of them have"
        some = f"{ordered} of them {'has' if ordered == 1 else 'have'}"
        later += f"; {all_of_them if thinned + deleted == ordered else some} a tombstone already"
    freed = text.size(plan.freed_bytes + sum(others))
    yield f"{kept} kept, {thinned} thinned, {deleted} deleted: {freed} freed{later}"
    due = [note["bytes"] for note in document["waiting"] if note["is_due"] and note["action"] == "delete"]
    if due:
        which = text.count(len(due), "checkpoint")
        yield f"the tombstones of {which} are due: the next prune frees {text.size(sum(due))}"
    yield from _notice_lines(document)
    if document["plot"] is not None:
        yield f"picture written to {document['plot']}"
    if not verdict.allowed:
        yield (
            f"REFUSED: {verdict.why}, so `prune` would delete or thin only {verdict.unasked} of them. If the plan is "
            "right, `prune --yes` carries out all of it"
        )


def _done_lines(document: dict[str, Any], *, refused: bool) -> Iterator[str]:
    from bucketpoint.catalog.deletion.prune import gone_lines

    if document["stopped"] is not None:
        yield f"nothing was pruned: {document['stopped']}"
        yield from gone_lines(document["arguments"], document["gone"])
        return
    if refused:
        yield (
            f"REFUSED: {document['verdict']}, so this prune is limited to a few checkpoints. "
            "`bucketpoint prune --dry-run` shows the whole plan; `bucketpoint prune --yes` carries it out"
        )
    lines = [f"step {entry['step']} {words}" for name, words in _OUTCOMES.items() for entry in document[name]]
    lines += [f"step {entry['step']} was not deleted: {entry['why']}" for entry in document["refused"]]
    lines += [text.not_deleted(failure, "; the next prune tries it again") for failure in document["failures"]]
    yield from lines
    if not lines and not refused:
        yield "nothing to do"
    yield from _notice_lines(document)


def _due(note: Mapping[str, Any]) -> str:
    return f"has a tombstone, is due {'at the next prune' if note['is_due'] else 'after ' + text.when(note['due'])}"


def _notice_lines(document: Mapping[str, Any]) -> Iterator[str]:
    from bucketpoint.catalog.deletion.prune import gone_lines

    yield from document["future"]
    yield from gone_lines(document["arguments"], document["gone"])
    yield from document["unreported"].values()
    yield from unrecorded_lines(document["arguments"], document["unrecorded_steps"])
