"""`bucketpoint watch`: command around the observer of a run, with a live screen."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import run_lines, text
from bucketpoint.cli.command import Access, CommandResult, as_json, command
from bucketpoint.cli.commands.ls import observed, rows_of
from bucketpoint.cli.commands.prune import beside_plan
from bucketpoint.cli.options import run_and_policy, run_arguments
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, first_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.observer import AttemptProgress, Observation, Observer
    from bucketpoint.catalog.snapshot import Checkpoint
    from bucketpoint.retention import RetentionPolicy

SHOWN = 10
"""Checkpoints shown at once: as many as fit a terminal of 24 lines while a save is in progress."""

_LEAST_ROWS = 3
"""Least number of checkpoints that are shown, on a terminal of any height."""

_GAPS = 10
"""Number of checkpoints from which the time between saves is computed."""


@command("watch")
@click.option(
    "--every",
    type=click.FloatRange(min=1),
    default=10,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two reads of the run.",
)
@click.option("--once", is_flag=True, help="Print one frame and exit; the default if the output is not a terminal.")
@run_and_policy
def watch(catalog: Catalog, policy: RetentionPolicy | None, access: Access, every: float, once: bool) -> CommandResult:
    """Show a run while it saves, until Ctrl-C.

    Shows the age of the newest whole checkpoint, the newest checkpoints, the saves that have not committed and how much
    of them is in the store, and what the policy does next. Each read of the run takes three listings, one more for
    each save under way, and a few small GETs; no data is read.
    """
    from bucketpoint.catalog.observer import Observer

    if once or as_json() or not sys.stdout.isatty():
        document = document_of(catalog, policy, observed(catalog))
        return CommandResult(document, run_lines.lines(document, document["taken"]))
    return _live(Observer(catalog), policy, every)


def document_of(
    catalog: Catalog, policy: RetentionPolicy | None, observation: Observation, *, shown: int | None = SHOWN
) -> dict[str, Any]:
    """Return an observation as the fields of a JSON document, with the `shown` newest checkpoints. Makes no request."""
    snapshot, newest, record = observation.snapshot, observation.newest, observation.record
    # For display only: the later of this machine's clock and the newest object's time.
    now = max(catalog.clock(), snapshot.taken or 0.0)
    rows = list(rows_of(snapshot, catalog))
    document: dict[str, Any] = {
        "root": catalog.url,
        "arguments": run_arguments(catalog),
        "run": min(snapshot.runs, default=None),
        "taken": now,
        "newest": None,
        "interval_s": interval(snapshot.full),
        "count": len(rows),
        "bytes": sum(row["bytes"] for row in rows),
        "checkpoints": rows[::-1][:shown],
        "attempts": [_attempt(catalog, save, snapshot.taken) for save in observation.attempts],
        "waiting": [{"step": row["step"], **row["tombstone"]} for row in rows if row["tombstone"]],
        "policy": None,
        "problems": list(observation.problems),
        "unrecorded": len(snapshot.unrecorded),
    }
    if newest is not None:
        document["newest"] = {
            "step": newest.step,
            "url": catalog.url_of_folder(newest.folder),
            "created": newest.created,
            "age_s": max(now - newest.created, 0.0),
            "bytes": sum(newest.groups.values()),
            "objects": record.objects if record is not None else None,
            "seconds": record.seconds if record is not None else None,
        }
    if policy is not None:
        _add_policy(document, catalog, policy, observation)
    return document


def interval(checkpoints: Sequence[Checkpoint]) -> float | None:
    """Return the usual time between the last saves of full checkpoints; None if it is not known.

    Only times that rise with the steps count, because a copy of an older step is no save of the run. Of two gaps the
    shorter one counts.
    """
    saved = [one.created for one in sorted(checkpoints, key=lambda one: one.step)][-_GAPS:]
    gaps = [later - earlier for earlier, later in pairwise(saved) if later > earlier]
    return statistics.median_low(gaps) if gaps else None


def _attempt(catalog: Catalog, save: AttemptProgress, now: float | None) -> dict[str, Any]:
    return {
        "step": save.step,
        "url": catalog.url_of_folder(save.folder),
        "token": save.token,
        "started": save.started,
        "objects": save.objects,
        "bytes": save.bytes,
        "latest": save.latest,
        "live": save.is_live(now),
    }


def _add_policy(document: dict[str, Any], catalog: Catalog, policy: RetentionPolicy, observation: Observation) -> None:
    from bucketpoint.catalog.deletion.prune import judged
    from bucketpoint.catalog.run import is_elsewhere

    planned, verdict = judged(policy, observation.snapshot.rows())
    entries = {entry.row.name: entry for entry in planned.entries}
    for row in document["checkpoints"]:
        entry = entries.get((row["step"], row["token"]))
        row["action"] = entry.action if entry is not None else None
        row["kept_by"] = list(dict.fromkeys(reason.rule for reason in entry.reasons)) if entry is not None else []
    to_go = [entry for entry in planned.entries if entry.action != "keep" and not entry.is_ordered]
    runs = observation.snapshot.runs
    document["policy"] = {
        "when": policy.prune.when,
        "rules": list(planned.rules),
        "tombstones": [
            {"step": entry.row.step, "token": entry.row.id, "action": entry.action, "bytes": entry.row.bytes}
            for entry in to_go
        ],
        "allowed": verdict.allowed,
        "unasked": verdict.unasked,
        "verdict": verdict.why,
        **beside_plan(policy, catalog, observation.snapshot, planned),
    }
    if policy.root is not None and is_elsewhere(policy.root, catalog):
        from bucketpoint.stores.redact import without_credentials

        document["problems"].append(
            f"the policy is for the run at {without_credentials(policy.root)}; the lines show what it would do here"
        )
    if runs and policy.run not in runs:
        mine = f"of run {policy.run}" if policy.run else "of a run without a name"
        name = first_of(sorted(runs))
        document["problems"].append(f"the policy is {mine}, but this is run {name}, so it prunes nothing here")


def _live(observer: Observer, policy: RetentionPolicy | None, every: float) -> CommandResult:
    """Draw the run again each second, so that ages advance between two looks, until Ctrl-C."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise BucketpointError(
            "A live screen needs the package rich", remedy="pip install 'rich>=13', or pass --once"
        ) from None
    clock = observer.catalog.clock
    # An error at the first look ends the command: the bucket or the credentials are wrong.
    document = _document(observer, policy)
    failure: BucketpointError | None = None
    # Give rich the underlying stream: the program's own stream would escape rich's control characters.
    console = Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    def drawn() -> RenderableType:
        return picture(document, clock(), failure, height=console.height)

    try:
        with Live(console=console, get_renderable=drawn, refresh_per_second=1, screen=True) as live:
            while True:
                live.refresh()
                time.sleep(every)
                try:
                    document, failure = _document(observer, policy), None
                except BucketpointError as error:
                    # The last document stays on the screen, with its age.
                    failure = error
    except KeyboardInterrupt:
        # Ctrl-C is the usual end of `watch`, so it is no interruption. The last frame stays on the terminal.
        return CommandResult(document, run_lines.lines(document, max(clock(), document["taken"])))


def picture(
    document: Mapping[str, Any], now: float, failure: BucketpointError | None = None, *, height: int = 40
) -> RenderableType:
    """Draw a document in colours, with fewer checkpoints on a terminal with few lines."""
    from rich.console import Group
    from rich.text import Text

    parts: list[tuple[str, str]] = []
    if failure is not None:
        old = run_lines.duration(now - document["taken"])
        parts.append(("bold red", f"Reading the run failed: {failure.message}. This is its state {old} ago"))
    others = len(parts) + len(list(run_lines.frame(document, now, 0)))
    parts += run_lines.frame(document, now, max(_LEAST_ROWS, height - others))
    # Control characters in names are escaped, and brackets in a line are no markup.
    return Group(*(Text(text.printable(line), style) for style, line in parts))


def _document(observer: Observer, policy: RetentionPolicy | None) -> dict[str, Any]:
    """Look at the run. Before the run begins, a problem in the document names what is at the URL instead."""
    from bucketpoint.catalog.run import survey

    observation = observer.look()
    document = document_of(observer.catalog, policy, observation)
    if observation.is_empty:
        try:
            survey(observer.catalog)
        except CheckpointNotFoundError as error:
            document["problems"].append(error.message)
    return document
