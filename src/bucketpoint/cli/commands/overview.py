"""`bucketpoint overview`: command around the page that describes a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, command, write_file
from bucketpoint.cli.commands import verify as verifying
from bucketpoint.cli.commands.cost import TITLES, costs_of, price_option
from bucketpoint.cli.commands.watch import document_of
from bucketpoint.cli.options import progress_option, trusted_option
from bucketpoint.cli.run_policy import run_and_policy
from bucketpoint.errors import CheckpointNotFoundError, MetadataError, UnsafeDataError

if TYPE_CHECKING:
    from bucketpoint.catalog.catalog import Catalog
    from bucketpoint.catalog.snapshot import Snapshot
    from bucketpoint.retention import Plan, RetentionPolicy


@command("overview")
@click.option("--html", "file", required=True, type=click.Path(dir_okay=False), metavar="FILE", help="File to write.")
@price_option
@click.option("--verify", is_flag=True, help="Re-read every byte of every checkpoint, as `verify --all` does.")
@trusted_option
@progress_option
@run_and_policy
def overview(
    catalog: Catalog,
    policy: RetentionPolicy | None,
    access: Access,
    file: str,
    price: float,
    verify: bool,
    trusted: bool,
    progress: bool | None,
) -> CommandResult:
    """Write a page about a run, as one HTML file.

    The page shows checkpoints, stored bytes and their cost, saves that did not commit and, with --policy, what is kept
    and why. It loads nothing from elsewhere. Takes the requests of `watch`, one small read for each checkpoint and each
    pin, and one listing for each checkpoint without a record. Exits with 1 if --verify finds damage.
    """
    from bucketpoint.catalog.deletion.prune_worker import judged
    from bucketpoint.catalog.notes import pins
    from bucketpoint.catalog.observer import Observer
    from bucketpoint.catalog.survey import survey
    from bucketpoint.cli.html.page import RunReport, page
    from bucketpoint.stores.redact import clean

    observation = Observer(catalog).look()
    if observation.is_empty:
        # Raises, and says what is at the URL instead of a run.
        survey(catalog)
    snapshot = observation.snapshot
    described = document_of(catalog, policy, observation, shown=None)
    plan: Plan | None = judged(policy, snapshot.rows())[0] if policy is not None else None
    costs = list(_costs(catalog, described, snapshot, plan, price))
    title = clean(catalog.url)
    verified = None
    if verify:
        options = access.for_url(catalog.url)
        verified = [
            (url, ok, [line.replace(catalog.url, title) for line in lines])
            for url, ok, lines in _verified(described, options, trusted=trusted, progress=progress)
        ]
    held = [(pin.step, pin.reason, pin.author) for pin in pins(catalog)] if snapshot.notes.pins else []
    report = RunReport(title, described, costs, price, _seconds(catalog, snapshot), held, plan, verified)
    write_file(file, page(report), "page")
    whole = sum(ok for _, ok, _ in verified or ())
    document = {
        "root": catalog.url,
        "html": file,
        "checkpoints": costs[0][1],
        "bytes": costs[0][2],
        "dollars_a_month": costs[0][3],
        "attempts": len(described["attempts"]),
        "problems": described["problems"],
        "verified": None if verified is None else {"whole": whole, "damaged": len(verified) - whole},
    }
    return CommandResult(document, _lines(document), ok=whole == len(verified or ()))


def _costs(
    catalog: Catalog, described: dict[str, Any], snapshot: Snapshot, plan: Plan | None, price: float
) -> Iterator[tuple[str, int, int, float]]:
    """Yield the lines of `cost`. Sizes of checkpoints without a record, one LIST each, are added to the document."""
    from bucketpoint.catalog.survey import size_of

    measured = {catalog.url_of_folder(one.folder): size_of(catalog, one.folder) for one in snapshot.unrecorded}
    for row in described["checkpoints"]:
        row["bytes"] = measured.get(row["url"], row["bytes"])
    for name, part in costs_of(snapshot, [*measured.values()], plan, price).items():
        if part is not None and (part["checkpoints"] or name in ("now", "what_if")):
            yield TITLES[name], part["checkpoints"], part["bytes"], part["dollars_a_month"]


def _seconds(catalog: Catalog, snapshot: Snapshot) -> dict[str, float]:
    """Return how long saves took, by the URL of their checkpoint, as far as their records say it."""
    from bucketpoint.catalog.save_log import read_record
    from bucketpoint.cli.html.page import MOST_ROWS
    from bucketpoint.transfer import TransferOptions
    from bucketpoint.transfer.pieces import for_each

    found: dict[str, float] = {}

    def read(key: str, folder: str) -> None:
        # A damaged record is no reason for no page: `verify` describes the damage.
        with contextlib.suppress(MetadataError):
            record = read_record(catalog, key)
            if record is not None and record.seconds is not None:
                found[catalog.url_of_folder(folder)] = record.seconds

    recorded = [(one.key, one.folder) for one in snapshot.checkpoints if one.key is not None]
    for_each(recorded[-MOST_ROWS:], lambda one: read(*one), TransferOptions())
    return found


def _verified(
    described: dict[str, Any], options: dict[str, Any], *, trusted: bool, progress: bool | None
) -> Iterator[tuple[str, bool, list[str]]]:
    """Verify each checkpoint, the newest first. Those whose metadata cannot be read do not hide the others."""
    from bucketpoint.checkpoint.open import open_checkpoint
    from bucketpoint.checkpoint.verify import verify
    from bucketpoint.dcp.progress_bar import progress_callback

    for row in described["checkpoints"]:
        url = row["url"]
        try:
            with progress_callback(progress, 0) as callback:
                done = verify(open_checkpoint(url, storage_options=options, trusted=trusted), progress=callback)
        except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
            yield url, False, [f"DAMAGED {url}: {error.message}"]
        else:
            # The verdict names the checkpoint, and comes last: the page begins with it.
            *found, verdict = verifying.lines(done)
            yield url, done.ok, [verdict, *found]


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{text.count(document['checkpoints'], 'checkpoint')}, {text.size(document['bytes'])}, "
        f"${document['dollars_a_month']:,.2f} a month: {document['html']}"
    )
    yield from (f"PROBLEM: {problem}" for problem in document["problems"])
    verified = document["verified"]
    if verified is not None:
        number = verified["whole"] + verified["damaged"]
        yield f"{verified['whole']} of {text.count(number, 'checkpoint')} {text.are(verified['whole'])} whole"
