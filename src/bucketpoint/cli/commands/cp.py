"""`bucketpoint cp`: command around `dcp.copy`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, agreed, command
from bucketpoint.cli.options import between_stores, whole_run
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from bucketpoint.checkpoint.open import SavedCheckpoint
    from bucketpoint.checkpoint.verify import Verification
    from bucketpoint.dcp.copy import Copied, CopyPlan
    from bucketpoint.location import Location
    from bucketpoint.transfer.copy import CopyJob


@command("cp")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at the destination, if there is one.")
@click.option(
    "--verify", "verified", is_flag=True, help="Read the copy again after its commit, and check its checksums."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation before all checkpoints of a run are copied.")
@between_stores
def cp(
    source: Location,
    target: Location,
    overwrite: bool,
    dry_run: bool,
    verified: bool,
    yes: bool,
    trusted: bool,
    progress: bool | None,
) -> CommandResult:
    """Copy a checkpoint, or all of a run, to any other store.

    A copy to a run, to an empty folder or to TARGET/ becomes TARGET/step-N, by the name of the source. All checkpoints
    of a run are copied to TARGET/step-N, except those that were copied before or wait to be deleted.

    The copy is committed after all of its data is there, so that readers never see half of it. Within one S3 service,
    the service copies the data itself; otherwise every byte passes through this machine and is compared with its
    checksum. Run the command again to continue an interrupted copy. If the destination is a step of a run that has a
    catalog, the copy gets a record there. Of a folder of safetensors all files are copied.
    """
    from bucketpoint.checkpoint.open import open_checkpoint
    from bucketpoint.checkpoint.verify import verify
    from bucketpoint.dcp.copy import copy_checkpoint, files_of_model, plan_copy
    from bucketpoint.dcp.progress_bar import progress_callback

    def copied(saved: SavedCheckpoint, place: Location, *, into: bool) -> CommandResult:
        plan = plan_copy(saved, place, overwrite=overwrite, into=into)
        if dry_run:
            return CommandResult(_document(plan, None, None), [*_plan_lines(plan)])
        with progress_callback(progress, 0) as callback:
            done = copy_checkpoint(plan, progress=callback)
            check = None
            if verified:
                check = verify(open_checkpoint(place.at(plan.url), trusted=trusted), progress=callback)
        return CommandResult(_document(plan, done, check), [*_lines(plan, done, check)], check is None or check.ok)

    try:
        saved = open_checkpoint(source, trusted=trusted, safetensors=False)
    except CheckpointNotFoundError:
        jobs = files_of_model(source, target, overwrite=overwrite)
        if jobs and verified:
            raise BucketpointError(
                "--verify compares checksums, and safetensors have none",
                url=source.url,
                remedy="Leave --verify out",
            ) from None
        if jobs:
            return _copied_files(source, target, jobs, dry_run, progress)
        catalog, snapshot = whole_run(source)
        # A step that waits to be deleted, as after a rollback, must not be the newest of the copy.
        checkpoints = [one for one in snapshot.checkpoints if one.name not in snapshot.going()]
        if not checkpoints:
            raise
    else:
        word = click.get_current_context().params["words"][-1]
        return copied(saved, target, into=word.endswith("/") or (os.path.isdir(word) and not os.listdir(word)))
    question = f"Copy {text.count(len(checkpoints), 'checkpoint')} of {catalog.url} to {target.url}?"
    if not (dry_run or yes or agreed(question)):
        return CommandResult({"source": catalog.url, "destination": target.url, "checkpoints": []}, ok=False)
    results: list[CommandResult] = []
    gone: list[str] = []
    for checkpoint in checkpoints:
        url = catalog.url_of_folder(checkpoint.folder)
        place = target.at(f"{target.url.rstrip('/')}/{checkpoint.folder}")
        try:
            saved = open_checkpoint(source.at(url), trusted=trusted, safetensors=False)
            if overwrite or not _was_copied(saved, place, trusted):
                results.append(copied(saved, place, into=False))
        except BucketpointError:
            # The run's own job may have deleted the checkpoint during the copy.
            if catalog.metadata_info(checkpoint.folder) is not None:
                raise
            gone.append(url)
    lines = [line for result in results for line in result.lines]
    lines += [f"{url} was deleted meanwhile: not copied" for url in gone]
    there = len(checkpoints) - len(results) - len(gone)
    lines += [f"{text.count(there, 'checkpoint')} had been copied before"] if there else []
    document: dict[str, Any] = {"source": catalog.url, "destination": target.url, "dry_run": dry_run}
    document |= {"checkpoints": [result.document for result in results], "deleted": gone}
    return CommandResult(document, lines, all(result.ok for result in results))


def _was_copied(saved: SavedCheckpoint, place: Location, trusted: bool) -> bool:
    """Return True if the checkpoint at `place` is a copy of `saved`."""
    from bucketpoint.checkpoint.open import open_checkpoint

    try:
        there = open_checkpoint(place, trusted=trusted).facts
    except CheckpointNotFoundError:
        return False
    return bool(there) and (there.get("copied_from"), there.get("created")) == (saved.url, saved.facts.get("created"))


def _copied_files(
    source: Location, target: Location, jobs: Sequence[CopyJob], dry_run: bool, progress: bool | None
) -> CommandResult:
    from bucketpoint.dcp.copy import copy_files
    from bucketpoint.dcp.progress_bar import progress_callback
    from bucketpoint.transfer import Meter

    nbytes = sum(job.source.size for job in jobs)
    if not dry_run:
        with progress_callback(progress, 0) as callback:
            meter = Meter("cp", target.url, nbytes, callback)
            copy_files(source, target, jobs, meter)
            meter.finish()
    document = {
        "source": source.url,
        "destination": target.url,
        "dry_run": dry_run,
        "files": len(jobs),
        "bytes": nbytes,
    }
    done = "would copy" if dry_run else "copied"
    return CommandResult(document, [f"{done} {text.count(len(jobs), 'file')}, {text.size(nbytes)}, to {target.url}"])


def _document(plan: CopyPlan, done: Copied | None, check: Verification | None) -> dict[str, Any]:
    from bucketpoint.cli.commands.verify import document

    return {
        "source": plan.saved.url,
        "destination": plan.url,
        "dry_run": done is None,
        "objects": len(plan.paths),
        "bytes": plan.nbytes,
        "already_there": len(plan.there),
        "replaces": plan.replaces,
        "recorded_in": plan.catalog.url if plan.catalog is not None else None,
        "server_side": plan.inside if done is None else done.inside,
        "checked_bytes": None if done is None else done.checked_bytes,
        "verification": None if check is None else document(check),
    }


def _plan_lines(plan: CopyPlan) -> Iterator[str]:
    yield f"would copy {text.count(len(plan.paths), 'object')}, {text.size(plan.nbytes)}, to {plan.url}"
    if plan.there:
        there, left = text.count(len(plan.there), "object"), text.size(plan.left_nbytes)
        yield f"  {there} of an interrupted copy are at the destination already; {left} remain to copy"
    yield (
        "  the service copies the data itself"
        if plan.inside
        else "  the data passes through this machine, which compares checksums"
    )
    if plan.catalog is not None:
        yield f"  the catalog of the run at {plan.catalog.url} gets a record of the copy"
    if plan.replaces:
        yield "  REPLACES the checkpoint that is committed at the destination"


def _lines(plan: CopyPlan, done: Copied, check: Verification | None) -> Iterator[str]:
    from bucketpoint.cli.commands.verify import lines

    how = "copied by the service itself, sizes compared"
    if not done.inside:
        how = f"copied through this machine, {text.size(done.checked_bytes)} compared with checksums"
    yield f"copied {text.count(len(plan.paths), 'object')}, {text.size(plan.nbytes)}, to {plan.url}: {how}"
    if plan.there:
        yield f"  {text.count(len(plan.there), 'object')} of an interrupted copy were at the destination already"
    if plan.catalog is not None:
        yield f"  the copy is recorded in the catalog of the run at {plan.catalog.url}"
    if check is not None:
        yield from lines(check)
