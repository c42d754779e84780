"""`bucketpoint rm`: command around the removal of one checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, as_json, command
from bucketpoint.cli.options import checkpoint_argument

if TYPE_CHECKING:
    from bucketpoint.catalog.deletion.remove import Removal
    from bucketpoint.catalog.deletion.state import Pruned
    from bucketpoint.location import Location


@command("rm")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--force", is_flag=True, help="Delete the checkpoint even if it is pinned, in use, or the newest whole one."
)
@checkpoint_argument
def rm(place: Location, dry_run: bool, yes: bool, force: bool) -> CommandResult:
    """Delete one checkpoint at once, without a grace period. Asks for confirmation first.

    The checkpoint may have a record or none, and any writer may have saved it. Deletes as a prune does: first the
    commit, and then only objects that the commit named. Exits with 1 if the deletion is refused, if the answer is no,
    or if a delete failed.
    """
    from bucketpoint.catalog.deletion.remove import plan_removal, remove
    from bucketpoint.catalog.records import process_name

    removal = plan_removal(place)
    if dry_run or (removal.reasons and not force):
        return _answer(removal, None, dry_run=dry_run, refused=None if force else _joined(removal))
    if not yes and not _agreed(removal):
        return _answer(removal, None, dry_run=False, refused="the deletion was not confirmed")
    done = remove(removal, holder=process_name(), force=force)
    return _answer(removal, done, dry_run=False, refused=_why_not(done))


def _agreed(removal: Removal) -> bool:
    if as_json() or not sys.stdin.isatty():
        raise click.UsageError("There is no terminal to ask for confirmation on: pass --yes")
    warning = f" ALTHOUGH {_joined(removal)}" if removal.reasons else ""
    return click.confirm(text.printable(f"Delete {_what(removal)}{warning}?"), err=True)


def _joined(removal: Removal) -> str | None:
    return " and ".join(removal.reasons) or None


def _why_not(done: Pruned) -> str | None:
    # Objects remain only if the commit is gone already.
    if done.deleted or done.failures:
        return None
    if done.stopped is not None or done.refused:
        return done.stopped or " and ".join(done.refused.values())
    return "the checkpoint was saved again meanwhile"


def _answer(removal: Removal, done: Pruned | None, *, dry_run: bool, refused: str | None) -> CommandResult:
    checkpoint = removal.checkpoint
    failures = done.failures if done is not None else []
    document: dict[str, Any] = {
        "url": removal.url,
        "step": checkpoint.step,
        "token": checkpoint.id,
        "bytes": removal.bytes,
        "recorded": checkpoint.key is not None,
        "dry_run": dry_run,
        "deleted": done is not None and bool(done.deleted or failures),
        "refused": refused,
        "failures": [vars(failure) for failure in failures],
    }
    return CommandResult(document, _lines(removal, document), ok=refused is None and not failures)


def _lines(removal: Removal, document: dict[str, Any]) -> Iterator[str]:
    if document["deleted"]:
        failures = document["failures"]
        codes = ", ".join(dict.fromkeys(failure["code"] for failure in failures))
        remain = f"; {text.count(len(failures), 'object')} of it could not be deleted ({codes})" if failures else ""
        yield f"deleted {_what(removal)}{remain}"
    elif document["refused"] is None:
        yield f"would delete {_what(removal)}"
    else:
        forced = "; --force deletes it anyway" if removal.reasons else ""
        yield f"not deleted: {_what(removal)}: {document['refused']}{forced}"
    for failure in document["failures"]:
        yield text.not_deleted(failure, "; the next prune tries it again")


def _what(removal: Removal) -> str:
    checkpoint = removal.checkpoint
    saved = f"saved {text.when(checkpoint.created)}"
    return f"{removal.url} ({saved}, {text.size(removal.bytes)}, token {checkpoint.id})"
