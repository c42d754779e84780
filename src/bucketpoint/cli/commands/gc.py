"""`bucketpoint gc`: command around the sweep of dead saves, the rebuilding of records, and the name of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import Age, progress_option, run_argument
from bucketpoint.cli.text import watched

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog


@command("gc")
@click.option(
    "--older-than",
    type=Age(),
    default="48h",
    show_default=True,
    help="Least time since the beginning and the last object of a save that counts as dead.",
)
@click.option(
    "--deep",
    is_flag=True,
    help="Look into every folder of the run, not only those of unfinished saves in the catalog.",
)
@click.option(
    "--adopt",
    is_flag=True,
    help="Delete nothing. Write the missing catalog records of the run's checkpoints. Other writers write none, "
    "and a lost catalog has none.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Delete nothing. Give this name to a run that was started without one. From then on only jobs whose policy "
    "has run: NAME save, restore and prune here. An empty NAME removes the name.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
@progress_option
@run_argument
def gc(
    catalog: Catalog,
    older_than: float,
    deep: bool,
    adopt: bool,
    name: str | None,
    dry_run: bool,
    progress: bool | None,
) -> CommandResult:
    """Delete the data and open uploads that dead saves left behind.

    That is data that no checkpoint names, and multipart uploads that nobody completes. Also removes objects that
    `doctor` wrote at ROOT and could not delete. Checkpoints are never touched, with or without a record. Exits with 1
    if something could not be deleted, or if the run has another name than --name.
    """
    if adopt and name is not None:
        raise click.UsageError("--adopt and --name are two tasks: pass one of them")
    if adopt:
        return _adopted(catalog, dry_run=dry_run)
    if name is not None:
        return _named(catalog, name, dry_run=dry_run)
    from bucketpoint.catalog.deletion.sweep import sweep
    from bucketpoint.doctor.scratch import sweep_leftovers

    with watched(catalog, progress) as at:
        done = sweep(at, older_than=older_than, deep=deep, dry_run=dry_run)
        sweep_leftovers(at.store, at.prefix, done, dry_run=dry_run)
    document: dict[str, Any] = {
        "root": catalog.url,
        "dry_run": dry_run,
        "objects": done.objects,
        "bytes": done.bytes,
        "uploads": done.uploads,
        "notes": done.notes,
        "failures": [vars(failure) for failure in done.failures],
    }
    return CommandResult(document, _lines(document), ok=not done.failures)


def _lines(document: dict[str, Any]) -> Iterator[str]:
    verb = "would be deleted" if document["dry_run"] else "deleted"
    counts = f"{text.count(len(document['objects']), 'object')}, {text.size(document['bytes'])}"
    yield f"{verb}: {counts}, {text.count(len(document['uploads']), 'open upload')}"
    for key in [*document["objects"], *document["uploads"]] if document["dry_run"] else ():
        yield f"  {key}"
    for failure in document["failures"]:
        yield text.not_deleted(failure)


def _adopted(catalog: Catalog, *, dry_run: bool) -> CommandResult:
    from bucketpoint.catalog.records import adopt
    from bucketpoint.catalog.run import survey

    folders = adopt(catalog, dry_run=dry_run)
    if not folders:
        # A run with nothing to adopt is no error. For a missing run, the survey raises one.
        survey(catalog)
    urls = [catalog.url_of_folder(folder) for folder in folders]
    lines = [*urls, f"{text.count(len(urls), 'checkpoint')} {'would be ' if dry_run else ''}adopted"]
    return CommandResult({"root": catalog.url, "dry_run": dry_run, "adopted": urls}, lines)


def _named(catalog: Catalog, name: str, *, dry_run: bool) -> CommandResult:
    from bucketpoint.catalog.run import survey
    from bucketpoint.catalog.save_log import claimed_by, name_run, unname
    from bucketpoint.retention import Keep, RetentionPolicy

    # A mistyped URL is an error, so that no claim is written there.
    survey(catalog)
    if not name:
        owner = claimed_by(catalog) if dry_run else unname(catalog)
        verb = "would have" if dry_run else "has"
        line = f"{catalog.url} {verb} no name any more: it was {owner}" if owner else f"{catalog.url} has no name"
        return CommandResult({"root": catalog.url, "dry_run": dry_run, "run": None}, [line])
    # Building a policy checks the name: names that policies accept are accepted here.
    RetentionPolicy(Keep(latest=1), run=name)
    owner = (claimed_by(catalog) or name) if dry_run else name_run(catalog, name)
    lines = [f"{catalog.url} {'would belong' if dry_run and owner == name else 'belongs'} to run {owner}"]
    if owner == name:
        lines.append(f"add `run: {owner}` to the policy of its jobs: other jobs are refused here")
    return CommandResult({"root": catalog.url, "dry_run": dry_run, "run": owner}, lines, ok=owner == name)
