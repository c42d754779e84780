"""`bucketpoint name`, `pin`, `unpin`, `undo` and `report`: commands around the notes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.commands.ls import json_number
from bucketpoint.cli.options import Age, Step, run_argument

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


@command("name")
@run_argument
@click.argument("run_name", metavar="NAME")
def name(catalog: Catalog, run_name: str) -> CommandResult:
    """Give a name to a run that was started without one.

    From then on only jobs whose policy says run: NAME save, restore and prune here. Exits with 1 if the run has another
    name already.
    """
    from bucketpoint.catalog.run_owner import name_run
    from bucketpoint.catalog.survey import survey
    from bucketpoint.retention import Keep, RetentionPolicy

    # Building a policy checks the name: names that policies accept are accepted here.
    RetentionPolicy(Keep(latest=1), run=run_name)
    # A mistyped URL is an error, and no claim for a run that nobody saves.
    survey(catalog)
    owner = name_run(catalog, run_name)
    document = {"root": catalog.url, "run": owner}
    lines = [f"{catalog.url} belongs to run {owner}"]
    if owner == run_name:
        lines.append(f"add `run: {owner}` to the policy of its jobs: others are refused here")
    return CommandResult(document, lines, ok=owner == run_name)


@command("pin")
@run_argument
@click.argument("step", type=Step())
@click.option("--reason", default="", help="Reason for the pin, for other people to read.")
@click.option("--expires", type=Age(), help="Duration after which the pin ends, such as 7d.")
def pin(catalog: Catalog, step: int, reason: str, expires: float | None) -> CommandResult:
    """Pin a step, so that no policy deletes it until it is unpinned. Withdraws a tombstone that the step has."""
    from bucketpoint.catalog import notes

    notes.refuse_missing(catalog, step)
    until = catalog.at_store_time().due(expires) if expires is not None else None
    name = notes.pin(catalog, step, reason=reason, expires=until)
    line = f"step {step} is pinned" + (f" until {text.when(until)}" if until is not None else "") + f": {name}"
    return CommandResult({"step": step, "pin": name, "expires": until, "reason": reason}, [line])


@command("unpin")
@run_argument
@click.argument("step", type=Step())
@click.argument("pin_id", required=False)
def unpin(catalog: Catalog, step: int, pin_id: str | None) -> CommandResult:
    """Remove all pins of a step, or the one that PIN_ID names. Exits with 1 if there is none."""
    from bucketpoint.catalog import notes

    count = notes.unpin(catalog, step, pin_id)
    line = f"{text.count(count, 'pin')} of step {step} removed"
    return CommandResult({"step": step, "removed": count}, [line], ok=count > 0)


@command("undo")
@run_argument
@click.argument("step", type=Step())
def undo(catalog: Catalog, step: int) -> CommandResult:
    """Withdraw the tombstone of a step during its grace period.

    The next prune decides anew about the step: pin it to keep it. Exits with 1 if there is no tombstone.
    """
    from bucketpoint.catalog import tombstones

    count = tombstones.undo(catalog, step)
    line = f"the tombstone of step {step} is withdrawn" if count else f"step {step} has no tombstone"
    return CommandResult({"step": step, "undone": count}, [line], ok=count > 0)


@command("report")
@run_argument
@click.argument("step", type=Step())
@click.argument("metrics", nargs=-1, required=True, metavar="NAME=VALUE...")
def report(catalog: Catalog, step: int, metrics: Sequence[str]) -> CommandResult:
    """Note metrics of a step. Metrics may be noted at any time. `best` rules use the last value of each metric."""
    from bucketpoint.catalog import notes

    values = dict(map(_pair, metrics))
    there = notes.has_checkpoint(catalog, step)
    notes.report(catalog, step, values)
    lines = [f"step {step}: " + ", ".join(f"{name}={value!r}" for name, value in values.items())]
    if not there:
        lines.append(f"there is no checkpoint of step {step} yet; a later one gets these metrics")
    numbers = {name: json_number(value) for name, value in values.items()}
    return CommandResult({"step": step, "metrics": numbers, "checkpoint": there}, lines)


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        name = ""
    if not name:
        raise click.BadParameter(
            f"{text!r} is not a metric: write NAME=VALUE, such as eval/loss=1.23", param_hint="NAME=VALUE"
        )
    return name, number
