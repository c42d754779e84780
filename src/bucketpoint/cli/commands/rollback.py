"""`bucketpoint rollback`: command around the rollback of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, agreed, command
from bucketpoint.cli.options import Age, run_and_steps, run_arguments

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


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
