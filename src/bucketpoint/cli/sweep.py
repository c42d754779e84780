"""`bucketpoint gc` and `adopt`: thin around the sweep of dead saves and the rebuilding of records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.frame import Answer, command
from bucketpoint.cli.run_options import Age, run_argument
from bucketpoint.cli.work import progress_option, watched

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


@command("gc")
@click.option(
    "--older-than", type=Age(), default="48h", show_default=True, help="Saves that began earlier and never committed."
)
@click.option("--deep", is_flag=True, help="Look into every folder, not only where a save is known to have begun.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@progress_option
@run_argument
def gc(catalog: Catalog, older_than: float, deep: bool, dry_run: bool, progress: bool | None, as_json: bool) -> Answer:
    """Remove what dead saves left: data that no checkpoint names, and multipart uploads that nobody completes.

    What `doctor` wrote at ROOT and could not delete goes too. Checkpoints are never touched, with or without a record.
    Ends with 1 if something could not be deleted.
    """
    from bucketpoint.catalog.sweep import sweep
    from bucketpoint.transfer.doctor_scratch import sweep_leftovers

    with watched(catalog, progress) as at:
        done = sweep(at, older_than=older_than, deep=deep, dry_run=dry_run)
        trials = sweep_leftovers(at.store, at.prefix, oldest=at.clock() - older_than, dry_run=dry_run)
    failures = [*done.failures, *trials.failures]
    document: dict[str, Any] = {
        "root": catalog.url,
        "dry_run": dry_run,
        "objects": [*done.objects, *(info.key for info in trials.objects)],
        "bytes": done.bytes + sum(info.size for info in trials.objects),
        "uploads": [*done.uploads, *trials.uploads],
        "notes": done.notes,
        "failures": [{"key": one.key, "code": one.code, "message": one.message} for one in failures],
    }
    return Answer(document, _lines(document), ok=not failures)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    verb = "would go" if document["dry_run"] else "removed"
    counts = f"{text.count(len(document['objects']), 'object')}, {text.size(document['bytes'])}"
    yield f"{verb}: {counts}, {text.count(len(document['uploads']), 'open upload')}"
    for key in [*document["objects"], *document["uploads"]] if document["dry_run"] else ():
        yield f"  {key}"
    for one in document["failures"]:
        yield f"not deleted: {one['key']} ({one['code']} {one['message']})"


@command("adopt")
@run_argument
def adopt(catalog: Catalog, as_json: bool) -> Answer:
    """Put checkpoints into the catalogue that lack a record: of other writers, or after the catalogue was lost."""
    from bucketpoint.catalog.adopt import adopt as adopted
    from bucketpoint.catalog.survey import survey

    folders = adopted(catalog)
    if not folders:
        # Nothing to adopt is fine, and no run at all is not.
        survey(catalog)
    urls = [catalog.url_of_folder(folder) for folder in folders]
    return Answer({"root": catalog.url, "adopted": urls}, [*urls, f"{text.count(len(urls), 'checkpoint')} adopted"])
