"""`bucketpoint gc` and `adopt`: commands around the sweep of dead saves and the rebuilding of records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import Age, progress_option, run_argument
from bucketpoint.cli.progress_line import watched

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


@command("gc")
@click.option(
    "--older-than",
    type=Age(),
    default="48h",
    show_default=True,
    help="Least age of a save that counts as dead, measured from its beginning.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Look into every folder of the run, not only those where the catalog knows of an unfinished save.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@progress_option
@run_argument
def gc(catalog: Catalog, older_than: float, deep: bool, dry_run: bool, progress: bool | None) -> CommandResult:
    """Delete the data and open uploads that dead saves left behind.

    That is data that no checkpoint names, and multipart uploads that nobody completes. Also removes objects that
    `doctor` wrote at ROOT and could not delete. Checkpoints are never touched, with or without a record. Exits with 1
    if something could not be deleted.
    """
    from bucketpoint.catalog.deletion.sweep import sweep
    from bucketpoint.doctor.scratch import sweep_leftovers

    with watched(catalog, progress) as at:
        done = sweep(at, older_than=older_than, deep=deep, dry_run=dry_run)
        trials = sweep_leftovers(at.store, at.prefix, oldest=done.oldest, dry_run=dry_run)
    failures = [*done.failures, *trials.failures]
    document: dict[str, Any] = {
        "root": catalog.url,
        "dry_run": dry_run,
        "objects": [*done.objects, *(info.key for info in trials.objects)],
        "bytes": done.bytes + sum(info.size for info in trials.objects),
        "uploads": [*done.uploads, *trials.uploads],
        "notes": done.notes,
        "failures": [vars(failure) for failure in failures],
    }
    return CommandResult(document, _lines(document), ok=not failures)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    verb = "would be deleted" if document["dry_run"] else "deleted"
    counts = f"{text.count(len(document['objects']), 'object')}, {text.size(document['bytes'])}"
    yield f"{verb}: {counts}, {text.count(len(document['uploads']), 'open upload')}"
    for key in [*document["objects"], *document["uploads"]] if document["dry_run"] else ():
        yield f"  {key}"
    for failure in document["failures"]:
        yield text.not_deleted(failure)


@command("adopt")
@run_argument
def adopt(catalog: Catalog) -> CommandResult:
    """Write the missing catalog records of a run's checkpoints.

    Checkpoints of other writers lack a record, and all checkpoints do after the catalog was lost.
    """
    from bucketpoint.catalog.reconcile import adopt as adopted
    from bucketpoint.catalog.survey import survey

    folders = adopted(catalog)
    if not folders:
        # Nothing to adopt is fine, but a missing run is an error: the survey raises it.
        survey(catalog)
    urls = [catalog.url_of_folder(folder) for folder in folders]
    lines = [*urls, f"{text.count(len(urls), 'checkpoint')} adopted"]
    return CommandResult({"root": catalog.url, "adopted": urls}, lines)
