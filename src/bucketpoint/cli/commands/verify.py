"""`bucketpoint verify`: command around `checkpoint.verify`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bucketpoint.cli import text
from bucketpoint.cli.command import CommandResult, command
from bucketpoint.cli.options import checkpoint_argument, progress_option, trusted_option
from bucketpoint.errors import CheckpointNotFoundError, MetadataError, ObjectNotFoundError, UnsafeDataError

if TYPE_CHECKING:
    from bucketpoint.checkpoint.verify import Verification
    from bucketpoint.location import Location


@command("verify")
@trusted_option
@click.option(
    "--all", "every", is_flag=True, help="Verify every checkpoint below the URL: a run, a prefix or a bucket."
)
@progress_option
@checkpoint_argument
def verify(place: Location, trusted: bool, every: bool, progress: bool | None) -> CommandResult:
    """Re-read every byte of a checkpoint and check every checksum.

    With --all, check every checkpoint below the URL. Names each damaged item, missing object and wrong size, and
    reports the number of bytes without a checksum to compare with. Exits with 1 if anything is damaged.
    """
    from bucketpoint.checkpoint.open import named_below

    if not every:
        try:
            verification = _read(place, trusted=trusted, progress=progress)
        except CheckpointNotFoundError as error:
            error.remedy = f"{error.remedy}; --all verifies every checkpoint below the URL"
            raise
        return CommandResult(document(verification), lines(verification), verification.ok)
    documents: list[dict[str, Any]] = []
    texts: list[str] = []
    whole = 0
    recorded: dict[str, str] = {}
    for at, record in named_below(place):
        if record is not None:
            recorded[at] = record
            continue
        recorded.pop(at, None)
        ok, found, said = one_of_many(place.at(at), trusted=trusted, progress=progress)
        whole += ok
        documents.append(found)
        texts += said
    for at, record in recorded.items():
        with contextlib.suppress(ObjectNotFoundError):
            # A prune at the same time deletes the record, too.
            place.opened[0].head(record)
            message = (
                "it has a record but no .metadata, so another tool removed it; `bucketpoint gc --deep` on its run "
                "removes the record"
            )
            documents.append({"url": at, "error": {"kind": "CheckpointNotFoundError", "message": message}})
            texts.append(f"GONE {at}: {message}")
    if not documents:
        raise CheckpointNotFoundError("No checkpoint was found below this URL", url=place.url)
    texts.append(f"{whole} of {text.count(len(documents), 'checkpoint')} below {place.url} {text.are(whole)} whole")
    return CommandResult({"url": place.url, "checkpoints": documents}, texts, whole == len(documents))


def one_of_many(place: Location, *, trusted: bool, progress: bool | None) -> tuple[bool, dict[str, Any], list[str]]:
    """Verify one of several checkpoints. Return True if it is whole, its document, and its lines with the verdict last.

    Damaged metadata, or a prune meanwhile, is a result and no error, so that the other checkpoints are verified.
    """
    try:
        verification = _read(place, trusted=trusted, progress=progress)
    except (CheckpointNotFoundError, MetadataError, UnsafeDataError) as error:
        failure = {"kind": type(error).__name__, "message": error.message}
        return False, {"url": place.url, "error": failure}, [f"DAMAGED {place.url}: {error.message}"]
    return verification.ok, {**document(verification), "error": None}, [*lines(verification)]


def _read(place: Location, *, trusted: bool, progress: bool | None) -> Verification:
    from bucketpoint.checkpoint.open import open_checkpoint
    from bucketpoint.checkpoint.verify import verify
    from bucketpoint.dcp.progress_bar import progress_callback

    with progress_callback(progress, 0) as callback:
        return verify(open_checkpoint(place, trusted=trusted), progress=callback)


def document(verification: Verification) -> dict[str, Any]:
    return {
        "url": verification.url,
        "objects": verification.objects,
        "items": verification.items,
        "read_bytes": verification.read_bytes,
        "checked_bytes": verification.checked_bytes,
        "unchecked_bytes": dict(sorted(verification.unchecked.items())),
        "damage": [
            {"object" if name == "path" else name: value for name, value in vars(damage).items()}
            for damage in verification.damage
        ],
        "notes": list(verification.notes),
    }


def lines(verification: Verification) -> Iterator[str]:
    for damage in verification.damage:
        place = damage.path
        if damage.start is not None and damage.stop is not None:
            place += f" bytes {damage.start}-{damage.stop - 1}"
        yield f"DAMAGED {place if damage.item is None else f'{damage.item} ({place})'}: {damage.message}"
    for reason, nbytes in sorted(verification.unchecked.items()):
        yield f"unchecked: {text.size(nbytes)} were read but not checked: {reason}"
    for note in verification.notes:
        yield f"note: {note}"
    counts = f"{text.count(verification.objects, 'object')}, {text.count(verification.items, 'item')}"
    whole = verification.checked_bytes == verification.read_bytes
    checked = "all" if whole else f"{text.size(verification.checked_bytes)} of them"
    amount = f"{text.size(verification.read_bytes)} read, {checked} compared with a checksum"
    verdict = "whole" if verification.ok else f"DAMAGED in {text.count(len(verification.damage), 'place')}"
    yield f"{verification.url} is {verdict}: {counts}, {amount}"
