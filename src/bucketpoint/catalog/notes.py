"""Notes on a step, by people and jobs: metrics, pins, leases, resumes.

Each note is a separate object that is never rewritten, so processes that write notes at once lose none.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.state import GoneError, undo
from bucketpoint.catalog.listing import read_notes
from bucketpoint.catalog.records import metadata_record, put_note, write_metrics
from bucketpoint.catalog.snapshot import Pin
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, StoreError
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import NoteKey
from bucketpoint.stores import delete_all

MAX_METRIC_NAME_BYTES = 120


def report(catalog: Catalog, step: int, metrics: Mapping[str, float], *, token: str | None = None) -> None:
    """Record metrics of a step, at any time and from any process. Of several values of a metric the last one counts.

    The metrics belong to one commit: a checkpoint that later replaces it does not inherit them. If the step has no
    checkpoint yet, they belong to every later commit of the step. NaN and infinite values are kept.

    Args:
        token: token of the commit; by default that of the step's present checkpoint, which costs two LISTs, and a GET
            of `.metadata` if a save is under way.

    Raises:
        BucketpointError: a name is empty or too long, or a value is no number.
    """
    checked = checked_metrics(metrics)
    begin = NoteKey(step, catalog_keys.METRICS, ("",)).name()
    others = () if token else catalog.listed(catalog_keys.NOTES, begin)
    # If this machine's clock is behind, the report still comes after the step's last one.
    at = max([catalog.clock(), *(other.time + 0.002 for other in read_notes(others).reports)])
    write_metrics(catalog, step, checked, at=at, token=token or _present_token(catalog, step))


def _present_token(catalog: Catalog, step: int) -> str | None:
    """Return the token of a step's checkpoint; None if it is unknown or the step has no checkpoint."""
    snapshot = catalog.step(step)
    tokens = {checkpoint.folder: checkpoint.id for checkpoint in snapshot.checkpoints}
    for folder in {attempt.folder for attempt in snapshot.attempts}:
        # An attempt without a record may have committed: the record is late, or the coordinator died before it.
        if (record := metadata_record(catalog, folder)) is not None and record.token is not None:
            tokens[folder] = record.token
    present = {token for _, token in tokens.items() - snapshot.given_up()}
    # A step may have two folders, with a padded and an unpadded number.
    return present.pop() if len(present) == 1 else None


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as Python floats.

    Raises:
        BucketpointError: a name is empty or too long, or a value is no number.
    """
    return {_metric_name(name): _value(name, value) for name, value in metrics.items()}


def has_checkpoint(catalog: Catalog, step: int) -> bool:
    snapshot = catalog.steps()
    if any(saved.step == step for saved in snapshot.checkpoints):
        return True
    return any(saved.step == step for saved in catalog.with_unrecorded(snapshot).checkpoints)


def refuse_missing(catalog: Catalog, step: int) -> None:
    """Raise `CheckpointNotFoundError` if there is no checkpoint of a step."""
    if not has_checkpoint(catalog, step):
        raise CheckpointNotFoundError(
            f"There is no checkpoint of step {step}", url=catalog.url, remedy="`bucketpoint ls` lists the steps"
        )


def pin(
    catalog: Catalog, step: int, *, reason: str = "", author: str | None = None, expires: float | None = None
) -> str:
    """Pin a step until it is unpinned, or until `expires` (seconds since the epoch). Return the pin's id.

    The pin also withdraws the step's tombstones.

    Raises:
        GoneError: the deletion of the checkpoint has begun; the step is not pinned.
    """
    # The id begins with a letter: `pin ROOT STEP ID --remove` would take an id of digits for a step.
    identity = f"p{os.urandom(4).hex()}"
    end = "" if expires is None else catalog_keys.milliseconds(expires)
    body = {"reason": reason, "author": author or _author(), "pinned": catalog.clock()}
    _hold(catalog, NoteKey(step, catalog_keys.PIN, (identity, end)), json.dumps(body, sort_keys=True).encode())
    return identity


def unpin(catalog: Catalog, step: int, id: str | None = None) -> int:  # noqa: A002 (as in `Pin.id`)
    """Remove the pin `id` of a step, or all its pins. Return the number of removed pins."""
    keys = [pin.key for pin in catalog.snapshot().notes.pins if pin.step == step and id in (None, pin.id)]
    delete_all(catalog.store, keys)
    return len(keys)


def reason_and_author(catalog: Catalog, pin: Pin) -> tuple[str, str]:
    """Return why a step is pinned, and by whom; empty texts if the note cannot be read. One GET."""
    body: dict[str, Any] = {}
    with contextlib.suppress(StoreError):
        body = catalog_keys.content_of(catalog.store.get(pin.key, first=1 << 20)[0])
    return str(body.get("reason", "")), str(body.get("author", ""))


def lease(catalog: Catalog, step: int, holder: str, *, seconds: int = 600) -> None:
    """Protect a step from deletion while it is read, for `seconds` from now by the store's clock.

    Args:
        holder: name of the reader. A call with the same name renews the lease; another name makes another lease.

    Raises:
        GoneError: the deletion of the checkpoint has begun; there is no lease.
    """
    if seconds < 1 or not holder or len(holder.encode()) > 60:
        raise BucketpointError("A lease needs a holder's name of 1 to 60 bytes and a duration of at least one second")
    _hold(catalog, NoteKey(step, catalog_keys.LEASE, (holder, str(int(seconds)))), b"")


def release(catalog: Catalog, step: int, holder: str) -> None:
    leases = catalog.snapshot().notes.leases
    delete_all(catalog.store, [one.key for one in leases if (one.step, one.holder) == (step, holder)])


def note_restored(catalog: Catalog, step: int) -> None:
    """Record that this run resumes from `step`, which is then kept until the next commit of a full checkpoint. One PUT.

    A waiting tombstone of the step is not carried out meanwhile. Whether the deletion has begun is not checked: the job
    has already loaded the checkpoint.
    """
    now = catalog_keys.milliseconds(catalog.clock())
    put_note(catalog, NoteKey(step, catalog_keys.RESTORED, (now, os.urandom(4).hex())))


def _hold(catalog: Catalog, note: NoteKey, body: bytes) -> None:
    key = put_note(catalog, note, body)
    # A pruner first claims a tombstone and then lists the notes; this function first writes the note and then looks for
    # claims. So at least one of the two sees the other's object.
    try:
        undo(catalog, note.step)
    except GoneError:
        delete_all(catalog.store, [key])
        raise


def _metric_name(name: str) -> str:
    try:
        length = len(catalog_keys.encode([name]))
    except UnicodeEncodeError:  # a shell's argument that is no UTF-8
        length = 0
    if not 0 < length <= MAX_METRIC_NAME_BYTES:
        raise BucketpointError(
            f"The name of a metric must have 1 to {MAX_METRIC_NAME_BYTES} bytes of UTF-8, where each byte other than "
            "a-z, A-Z, 0-9, - and . counts as three",
            key=name[:200],
        )
    return name


def _value(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError  # float() would accept text, and hide a mistake of the caller
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BucketpointError(f"A metric must be a number, not {type(value).__name__}", key=name) from None


def _author() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
