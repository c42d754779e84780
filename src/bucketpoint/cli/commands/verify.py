"""`bucketpoint verify`: command around `checkpoint.verify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import Access, CommandResult, command, store_options
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, MetadataError, UnsafeDataError

if TYPE_CHECKING:
    from bucketpoint.checkpoint.verify import Damage, Verification


@command("verify")
@click.argument("url")
@click.option("--trusted", is_flag=True, help="Unpickle classes outside the allow-list, too. This can run any code.")
@click.option(
    "--all", "every", is_flag=True, help="Verify every checkpoint below the URL: a run, a prefix or a bucket."
)
@click.option(
    "--progress/--no-progress", default=None, help="Show a progress bar on stderr. Default: only on a terminal."
)
@store_options
def verify(url: str, trusted: bool, every: bool, progress: bool | None, access: Access, as_json: bool) -> CommandResult:
    """Re-read every byte of a checkpoint and check every checksum.

    With --all, check every checkpoint below the URL. Names each damaged item, missing object and wrong size, and
    reports the number of bytes without a checksum to compare with. Exits with 1 if anything is damaged.
    """
    from bucketpoint.checkpoint.open import committed_below, open_checkpoint
    from bucketpoint.checkpoint.verify import verify as run
    from bucketpoint.dcp.progress_bar import progress_callback

    options = access.for_url(url)

    def one(at: str) -> Verification:
        with progress_callback(progress, 0) as callback:
            return run(open_checkpoint(at, storage_options=options, trusted=trusted), progress=callback)

    if not every:
        verification = one(url)
        return CommandResult(document(verification), lines(verification), verification.ok)
    results: list[Verification | BucketpointError] = []
    for at in committed_below(url, storage_options=options):
        try:
            results.append(one(at))
        except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
            # A checkpoint whose metadata is damaged, or that was pruned meanwhile, must not hide the others.
            error.url = at
            results.append(error)
    if not results:
        raise CheckpointNotFoundError("No checkpoint was found below this URL", url=url)
    ok = all(not isinstance(one, BucketpointError) and one.ok for one in results)
    return CommandResult({"url": url, "checkpoints": [_told(one) for one in results]}, _all_lines(url, results), ok)


def _told(one: Verification | BucketpointError) -> dict[str, Any]:
    if not isinstance(one, BucketpointError):
        return {**document(one), "error": None}
    return {"url": one.url, "error": {"kind": type(one).__name__, "message": one.message}}


def _all_lines(url: str, results: Sequence[Verification | BucketpointError]) -> Iterator[str]:
    whole = 0
    for one in results:
        if isinstance(one, BucketpointError):
            yield f"DAMAGED {one.url}: {one.message}"
        else:
            whole += one.ok
            yield from lines(one)
    yield f"{whole} of {text.count(len(results), 'checkpoint')} below {url} are whole"


def document(verification: Verification) -> dict[str, Any]:
    return {
        "url": verification.url,
        "objects": verification.objects,
        "items": verification.items,
        "read_bytes": verification.read_bytes,
        "checked_bytes": verification.checked_bytes,
        "unchecked_bytes": dict(sorted(verification.unchecked.items())),
        "damage": [
            {
                "kind": one.kind,
                "object": one.path,
                "item": one.item,
                "start": one.start,
                "stop": one.stop,
                "message": one.message,
            }
            for one in verification.damage
        ],
        "notes": list(verification.notes),
    }


def lines(verification: Verification) -> Iterator[str]:
    for one in verification.damage:
        yield f"DAMAGED {_where(one)}: {one.message}"
    for reason, nbytes in sorted(verification.unchecked.items()):
        yield f"unchecked: {text.size(nbytes)} were read but not checked: {reason}"
    for note in verification.notes:
        yield f"note: {note}"
    counts = f"{text.count(verification.objects, 'object')}, {text.count(verification.items, 'item')}"
    checked = text.size(verification.checked_bytes)
    amount = f"{text.size(verification.read_bytes)} read, {checked} of them compared with a checksum"
    verdict = "whole" if verification.ok else f"DAMAGED in {text.count(len(verification.damage), 'place')}"
    yield f"{verification.url} is {verdict}: {counts}, {amount}"


def _where(one: Damage) -> str:
    span = f" bytes {one.start}-{one.stop - 1}" if one.start is not None and one.stop is not None else ""
    return f"{one.item} ({one.path}{span})" if one.item is not None else f"{one.path}{span}"
