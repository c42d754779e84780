"""`bucketpoint pin`, `rollback`, `undo` and `report`: commands around the notes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, agreed, command
from bucketpoint.cli.commands.ls import json_number
from bucketpoint.cli.options import Age, run_and_steps, run_arguments

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


@command("pin")
@click.option("--reason", default="", help="Reason for the pin, for other people to read.")
@click.option("--expires", type=Age(), help="Duration after which the pin ends, such as 7d.")
@click.option("--remove", is_flag=True, help="Remove the pin that PIN_ID names; without PIN_ID, all pins of the step.")
@run_and_steps("ROOT STEP [PIN_ID]", behind=1)
def pin(
    catalog: Catalog, steps: Sequence[int], words: Sequence[str], reason: str, expires: float | None, remove: bool
) -> CommandResult:
    """Pin a step, so that no policy deletes it, or remove its pins.

    Also withdraws a tombstone of the step. Exits with 1 if there is no pin to remove.
    """
    from bucketpoint.catalog import notes

    step, pin_id = steps[0], next(iter(words), None)
    if remove:
        if reason or expires is not None:
            raise click.UsageError("--reason and --expires are for a new pin: leave them out, or --remove")
        count = notes.unpin(catalog, step, pin_id)
        line = f"{text.count(count, 'pin')} of step {step} removed"
        return CommandResult({"step": step, "removed": count}, [line], ok=count > 0)
    if pin_id is not None:
        raise click.UsageError("PIN_ID names a pin to remove: pass --remove, or leave it out")
    notes.refuse_missing(catalog, step)
    until = catalog.at_store_time().due(expires) if expires is not None else None
    name = notes.pin(catalog, step, reason=reason, expires=until)
    line = f"step {step} is pinned" + (f" until {text.when(until)}" if until is not None else "") + f": {name}"
    return CommandResult({"step": step, "pin": name, "expires": until, "reason": reason}, [line])


@command("rollback")
@run_and_steps()
@click.option(
    "--grace",
    type=Age(),
    default="24h",
    show_default=True,
    help="Grace period before newer checkpoints are deleted.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation, which is asked for on a terminal only.")
def rollback(catalog: Catalog, steps: Sequence[int], grace: float, dry_run: bool, yes: bool) -> CommandResult:
    """Roll a run back to a step, and delete newer checkpoints later. Asks for confirmation first on a terminal.

    Every newer checkpoint gets a tombstone, and the next restore finds this step. End the job first, or it saves newer
    ones again. `bucketpoint undo` withdraws a tombstone during the grace period. Pinned or leased checkpoints stay and
    are named. The command then exits with 1, because a restore finds the newest of them. In a program,
    `manager.restore(state, step, rollback=True)` does the same with its next commit.
    """
    from bucketpoint.catalog.restore_candidates import roll_back

    step = steps[0]
    if not (dry_run or yes):
        newer = roll_back(catalog, step, grace=grace, dry_run=True).steps
        question = f"Delete {text.count(len(newer), 'checkpoint')} newer than step {step} of {catalog.url}?"
        if newer and not agreed(question, required=False):
            document = {"root": catalog.url, "step": step, "dry_run": False, "tombstones": [], "due": None, "held": []}
            return CommandResult(document, ["nothing was rolled back: it was not confirmed"], ok=False)
    done = roll_back(catalog, step, grace=grace, dry_run=dry_run)
    document = {
        "root": catalog.url,
        "step": step,
        "dry_run": dry_run,
        "tombstones": done.steps,
        "due": done.due,
        "held": [{"step": discard.checkpoint.step, "why": why} for discard, why in done.held],
    }
    words = "would be deleted" if dry_run else "will be deleted"
    lines = [f"step {newer} {words} after {text.when(done.due)}" for newer in done.steps]
    lines += [
        f"step {discard.checkpoint.step} stays, because it is {why}: until the hold ends, a restore loads it"
        for discard, why in done.held
    ]
    if not done.held:
        lines.append(f"the next restore {'would load' if dry_run else 'loads'} step {step}")
    if done.steps and not dry_run:
        steps_of_it = " ".join(map(str, done.steps))
        lines.append(f"until then, `bucketpoint undo {run_arguments(catalog)} {steps_of_it}` withdraws the tombstones")
    return CommandResult(document, lines, ok=not done.held)


@command("undo")
@run_and_steps("ROOT STEP...", most=None)
def undo(catalog: Catalog, steps: Sequence[int]) -> CommandResult:
    """Withdraw the tombstones of steps during their grace period.

    The next prune decides again about the steps: pin those to keep. Exits with 1 if a step has no tombstone.
    """
    from bucketpoint.catalog import notes
    from bucketpoint.catalog.deletion import state

    counts = {step: state.undo(catalog, step) for step in dict.fromkeys(steps)}
    lines = [
        f"the tombstone of step {step} is withdrawn"
        if count
        else f"step {step} has no tombstone"
        if notes.has_checkpoint(catalog, step)
        else f"step {step} has no checkpoint: a deletion cannot be undone"
        for step, count in counts.items()
    ]
    document = {"step": steps[0], "steps": steps, "undone": sum(counts.values())}
    return CommandResult(document, lines, ok=all(counts.values()))


@command("report")
@run_and_steps("ROOT STEP NAME=VALUE...", behind=None)
def report(catalog: Catalog, steps: Sequence[int], words: Sequence[str]) -> CommandResult:
    """Note metrics of a step. Metrics may be noted at any time. `best` rules use the last value of each metric."""
    from bucketpoint.catalog import notes

    if not words:
        raise click.UsageError("The metric is missing: write NAME=VALUE after the step")
    step, values = steps[0], dict(map(_pair, words))
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
