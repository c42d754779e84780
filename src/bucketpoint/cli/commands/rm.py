"""`bucketpoint rm`: command around the removal of one checkpoint, or of all of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, agreed, command
from bucketpoint.cli.options import checkpoint_argument, whole_run
from bucketpoint.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from bucketpoint.catalog.deletion.remove import Removal
    from bucketpoint.catalog.deletion.state import Pruned
    from bucketpoint.catalog.snapshot import Snapshot
    from bucketpoint.location import Location
    from bucketpoint.stores import DeleteFailure


@command("rm")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option(
    "--force", is_flag=True, help="Delete the checkpoint even if it is pinned, in use, or the newest whole one."
)
@click.option("--run", "whole", is_flag=True, help="Delete all checkpoints of the run at the URL.")
@checkpoint_argument
def rm(place: Location, dry_run: bool, yes: bool, force: bool, whole: bool) -> CommandResult:
    """Delete a checkpoint, or all of a run, at once.

    There is no grace period. Asks for confirmation first.

    The checkpoint may have a record or none, and any writer may have saved it. Deletes as a prune does: first the
    commit, and then only objects that the commit named. Exits with 1 if the deletion is refused, if the answer is no,
    or if a delete failed.
    """
    from bucketpoint.catalog.deletion.remove import plan_removal, remove
    from bucketpoint.catalog.records import process_name

    if whole:
        return _run(place, dry_run=dry_run, yes=yes, force=force)
    try:
        removal = plan_removal(place)
    except CheckpointNotFoundError:
        if not whole_run(place)[1].checkpoints:
            raise
        remedy = "Name a step of it, or pass --run to delete all of its checkpoints"
        raise CheckpointNotFoundError("This is a run, not a checkpoint", url=place.url, remedy=remedy) from None
    if dry_run or (removal.reasons and not force):
        return _answer(removal, None, dry_run=dry_run, refused=None if force else _joined(removal))
    warning = f" ALTHOUGH {_joined(removal)}" if removal.reasons else ""
    if not yes and not agreed(f"Delete {_what(removal)}{warning}?"):
        return _answer(removal, None, dry_run=False, refused="the deletion was not confirmed")
    done = remove(removal, holder=process_name(), force=force)
    return _answer(removal, done, dry_run=False, refused=_why_not(done))


def _run(place: Location, *, dry_run: bool, yes: bool, force: bool) -> CommandResult:
    """Delete the checkpoints of a run one after the other, the oldest first. Its catalog stays, with a few notes."""
    from bucketpoint.catalog.deletion.remove import plan_removal, remove
    from bucketpoint.catalog.records import process_name
    from bucketpoint.catalog.run import names_below, other_files

    catalog, snapshot = whole_run(place)
    if not snapshot.checkpoints:
        raise other_files(names_below(catalog.store, catalog.prefix), place.url) or CheckpointNotFoundError(
            "The run has no checkpoint", url=place.url, remedy="Check the URL"
        )
    urls = [catalog.url_of_folder(checkpoint.folder) for checkpoint in snapshot.checkpoints]
    what = f"all {text.count(len(urls), 'checkpoint')} of {catalog.url}"
    refused = None if force else _held(snapshot)
    if not (dry_run or refused or yes or agreed(f"Delete {what}?")):
        refused = "the deletion was not confirmed"
    deleted: list[str] = []
    failures: list[DeleteFailure] = []
    for url in () if dry_run or refused else urls:
        # A checkpoint that comes into use meanwhile stays, and so do all later ones.
        refused = None if force else _held(catalog.snapshot())
        if refused:
            break
        try:
            removal = plan_removal(place.at(url))
        except CheckpointNotFoundError:
            # Another process, such as a prune, has deleted the checkpoint meanwhile.
            continue
        done = remove(removal, holder=process_name(), force=force, of_run=True)
        refused = _why_not(done)
        if refused:
            break
        failures += done.failures
        deleted.append(url)
    document = {"url": catalog.url, "dry_run": dry_run, "checkpoints": urls, "deleted": deleted, "refused": refused}
    document["failures"] = [vars(failure) for failure in failures]
    lines = [f"deleted {url}" for url in deleted]
    lines += [f"would delete {url}" for url in urls] if dry_run and not refused else []
    lines += [f"not deleted: {what}: {refused}"] if refused else []
    lines += [text.not_deleted(vars(failure), "; the next prune tries it again") for failure in failures]
    return CommandResult(document, lines, ok=refused is None and not failures)


def _held(snapshot: Snapshot) -> str | None:
    held = sorted(snapshot.held().items())
    return "; ".join(f"step {step} is {' and '.join(sorted(reasons))}" for step, reasons in held) or None


def _joined(removal: Removal) -> str | None:
    return " and ".join(removal.reasons) or None


def _why_not(done: Pruned) -> str | None:
    # Failures to delete objects occur only once the commit is deleted.
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
