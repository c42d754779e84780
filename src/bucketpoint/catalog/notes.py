"""Notes of people and jobs on a step: metrics, pins, leases, resumes. Each note is a separate object.

No note is read and rewritten: when several processes write notes at once, none is lost.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.state import GoneError, undo
from bucketpoint.catalog.listing import read_notes
from bucketpoint.catalog.records import metadata_record, put_note, write_metrics
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, StoreError
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import NoteKey
from bucketpoint.stores import delete_all

MAX_METRIC_NAME_BYTES = 120


@dataclass(frozen=True)
class PinInfo:
    """A pin, with the reason and the author that were given."""

    step: int
    id: str
    reason: str
    author: str
    expires: float | None


def report(
    catalog: Catalog,
    step: int,
    metrics: Mapping[str, float],
    *,
    at: float | None = None,
    token: str | None = None,
) -> None:
    """Note metrics of a step, at any time and from any process. Of several values of a name, the last reported counts.

    The metrics are those of one commit: a checkpoint that later replaces it has none of them. The step may have no
    checkpoint yet: the metrics then count for each that it gets. NaN and infinite values are kept as they are.

    Args:
        at: time of the measurement in seconds since the epoch; by default now, or just after the step's last report.
        token: token of the commit; by default that of the step's present checkpoint, which costs two LISTs, and a GET
            of `.metadata` if a save is under way.

    Raises:
        BucketpointError: a name is empty or too long, or a value is no number.
    """
    checked = checked_metrics(metrics)
    if at is None:
        begin = NoteKey(step, catalog_keys.METRICS, ("",)).name()
        others = () if token else catalog.listed(catalog_keys.NOTES, begin)
        at = max([catalog.clock(), *(other.time + 0.002 for other in read_notes(others).reports)])
    write_metrics(catalog, step, checked, at=at, token=token or _present_token(catalog, step))


def _present_token(catalog: Catalog, step: int) -> str | None:
    """Return the token of a step's checkpoint; None if there is none, or it is unknown."""
    snapshot = catalog.step(step)
    tokens = {checkpoint.folder: checkpoint.id for checkpoint in snapshot.checkpoints}
    for folder in {attempt.folder for attempt in snapshot.attempts}:
        # An attempt may have committed without a record, as the record is late or its coordinator died.
        if (record := metadata_record(catalog, folder)) is not None and record.token is not None:
            tokens[folder] = record.token
    present = {token for _, token in tokens.items() - snapshot.given_up()}
    # A step may have two folders, padded and not.
    return present.pop() if len(present) == 1 else None


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as Python's floats.

    Raises:
        BucketpointError: a name is empty or too long, or a value is no number.
    """
    return {_metric_name(name): _value(name, value) for name, value in metrics.items()}


def has_checkpoint(catalog: Catalog, step: int) -> bool:
    """Return True if there is a checkpoint of a step, with or without a record."""
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
    """Keep a step until it is unpinned, or until `expires` (seconds since the epoch). Return the pin's id.

    If the checkpoint already has a tombstone, the pin takes the tombstone back.

    Raises:
        GoneError: the deletion of the checkpoint has begun. Nothing is pinned.
    """
    # A letter first: an id of digits alone would read as a step in `pin ROOT STEP ID --remove`.
    identity = f"p{os.urandom(4).hex()}"
    end = "" if expires is None else catalog_keys.milliseconds(expires)
    body = {"reason": reason, "author": author or _author(), "pinned": catalog.clock()}
    _hold(catalog, NoteKey(step, catalog_keys.PIN, (identity, end)), json.dumps(body, sort_keys=True).encode())
    return identity


def unpin(catalog: Catalog, step: int, id: str | None = None) -> int:  # noqa: A002 (what the pin calls it)
    """Remove one pin of a step, or all of them. Return the number of removed pins."""
    keys = [pin.key for pin in catalog.snapshot().notes.pins if pin.step == step and id in (None, pin.id)]
    delete_all(catalog.store, keys)
    return len(keys)


def pins(catalog: Catalog) -> list[PinInfo]:
    """Return all pins, expired ones too. One GET for each."""
    infos = []
    for pin in catalog.snapshot().notes.pins:
        body: dict[str, Any] = {}
        with contextlib.suppress(StoreError):
            body = catalog_keys.content_of(catalog.store.get(pin.key, first=1 << 20)[0])
        infos.append(PinInfo(pin.step, pin.id, str(body.get("reason", "")), str(body.get("author", "")), pin.expires))
    return infos


def lease(catalog: Catalog, step: int, holder: str, *, seconds: int = 600) -> None:
    """Keep a step while it is read: for `seconds` from now by the store's clock. Call it again to renew.

    Args:
        holder: name of the reader. The same name renews the lease; another name makes another lease.

    Raises:
        GoneError: the deletion of the checkpoint has begun. Nothing is leased.
    """
    if seconds < 1 or not holder or len(holder.encode()) > 60:
        raise BucketpointError("A lease needs a holder's name of 1 to 60 bytes and a duration of at least one second")
    _hold(catalog, NoteKey(step, catalog_keys.LEASE, (holder, str(int(seconds)))), b"")


def release(catalog: Catalog, step: int, holder: str) -> None:
    """End a holder's lease on a step."""
    leases = catalog.snapshot().notes.leases
    delete_all(catalog.store, [one.key for one in leases if (one.step, one.holder) == (step, holder)])


def note_restored(catalog: Catalog, step: int) -> None:
    """Record that this run resumes from `step`, which is then kept until a newer full checkpoint is committed. One PUT.

    A tombstone of the step has no effect while the note is valid. The function does not check whether the deletion has
    begun: the job has already read what it needs.
    """
    now = catalog_keys.milliseconds(catalog.clock())
    put_note(catalog, NoteKey(step, catalog_keys.RESTORED, (now, os.urandom(4).hex())))


def _hold(catalog: Catalog, note: NoteKey, body: bytes) -> None:
    key = put_note(catalog, note, body)
    # A pruner first claims its tombstone and then looks for notes; this function first writes its note and then looks
    # for claims. So at least one of the two sees the other.
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
            raise TypeError  # float() reads text, which would hide that another value was meant
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BucketpointError(f"A metric must be a number, not {type(value).__name__}", key=name) from None


def _author() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
