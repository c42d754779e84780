"""`bucketpoint ls`: command around the catalog's snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import run_lines, text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import run_argument, run_arguments
from bucketpoint.errors import CheckpointNotFoundError, first_of

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.observer import Observation
    from bucketpoint.catalog.snapshot import Snapshot


@command("ls")
@click.option(
    "--all", "everything", is_flag=True, help="List also saves that are under way or died before their commit."
)
@run_argument
def ls(catalog: Catalog, everything: bool) -> CommandResult:
    """List the checkpoints of a run, or the runs of a bucket.

    Shows sizes, metrics and holds (pinned, leased, restored from), the oldest checkpoint first, and pending deletions.
    Sends the requests of `watch --once`; for the runs below a URL, one listing for each folder.
    """
    try:
        seen = observed(catalog)
    except CheckpointNotFoundError:
        if not (runs := list(_runs_below(catalog))):
            raise
        return CommandResult({"root": catalog.url, "runs": runs}, [*runs, text.count(len(runs), "run")])
    rows = list(rows_of(seen.snapshot, catalog))
    document: dict[str, Any] = {"root": catalog.url, "arguments": run_arguments(catalog)}
    document |= {"run": min(seen.snapshot.runs, default=None), "checkpoints": rows}
    document["gone"] = sorted(checkpoint.step for checkpoint in seen.snapshot.gone)
    if everything:
        document["attempts"] = [
            {"step": save.step, "url": catalog.url_of_folder(save.folder), "token": save.token, "started": save.started}
            for save in reversed(seen.attempts)
        ]
    return CommandResult(document, _lines(document, catalog.clock()))


def observed(catalog: Catalog) -> Observation:
    """Look at a run once. If there is no run, the error names what is at the URL instead."""
    from bucketpoint.catalog.observer import Observer
    from bucketpoint.catalog.run import survey

    observation = Observer(catalog).look()
    if observation.is_empty:
        survey(catalog)
    return observation


def _runs_below(catalog: Catalog) -> Iterator[str]:
    """Yield the URLs of folders with a catalog, or with folders of checkpoints. One LIST for each folder."""
    from bucketpoint.format.catalog_keys import CATALOG

    above = catalog.key("")
    for folder in catalog.store.list_folders(above):
        inside = (name[len(folder) :].rstrip("/") for name in catalog.store.list_folders(folder))
        if any(name == CATALOG or catalog.template.step_of(name) is not None for name in inside):
            yield catalog.url_of_folder(folder[len(above) :].rstrip("/"))


def json_number(value: float) -> float | str:
    """Return a number for JSON: NaN and the infinities become text."""
    return value if math.isfinite(value) else str(value)


def rows_of(snapshot: Snapshot, catalog: Catalog) -> Iterator[dict[str, Any]]:
    metrics, held = snapshot.metrics(), snapshot.held()
    tombstones = {(note.folder, note.id): note for note in snapshot.notes.tombstones}
    for saved in snapshot.checkpoints:
        tombstone = tombstones.get((saved.folder, saved.id))
        yield {
            "step": saved.step,
            "url": catalog.url_of_folder(saved.folder),
            "created": saved.created,
            "recorded": saved.key is not None,
            "kind": saved.kind,
            "bytes": sum(saved.groups.values()),
            "groups": dict(saved.groups),
            "token": saved.id or None,
            "metrics": {name: json_number(value) for name, value in sorted(metrics.get(saved.name, {}).items())},
            "held": sorted(held.get(saved.step, ())),
            "tombstone": {"action": tombstone.action, "due": tombstone.due} if tombstone is not None else None,
        }


def _lines(document: dict[str, Any], now: float) -> Iterator[str]:
    from bucketpoint.catalog.deletion.prune import gone_lines

    rows = document["checkpoints"]
    if not rows:
        hint = "" if "attempts" in document else "; --all lists saves that are under way or died"
        yield f"{document['root']} has no committed checkpoint{hint}"
    else:
        cells = ((row["created"], *run_lines.row_cells(row, now)) for row in rows)
        table = [(step, text.when(created), *others) for created, step, _, *others in cells]
        yield from text.table([("step", "saved", "kind", "size", "metrics", ""), *table], indent=0)
        yield f"{text.count(len(rows), 'checkpoint')}, {text.size(sum(row['bytes'] for row in rows))}"
        yield from unrecorded_lines(document["arguments"], [row["step"] for row in rows if not row["recorded"]])
    yield from gone_lines(document["arguments"], document["gone"])
    for save in document.get("attempts", ()):
        yield f"a save of step {save['step']} began {text.when(save['started'])} and has not committed"


def unrecorded_lines(arguments: str, steps: Sequence[int]) -> Iterator[str]:
    """Yield a line about checkpoints without a record, which no policy deletes."""
    if steps:
        remedy = f"`bucketpoint gc {arguments} --adopt` writes the missing records"
        without = f"{text.count(len(steps), 'checkpoint')} without a record (step {first_of(steps, run_lines.NAMED)})"
        yield f"{without}, which no policy deletes: {remedy}"
