"""The journal of a conversion, beside its target: planned objects, complete objects, and their checksums.

The journal is a note and not the truth: an object counts as done only while the store reports the ETag and size that it
had when it was written.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.convert.target import TargetPlace
from bucketpoint.errors import AccessDeniedError, BucketpointError, CorruptDataError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import ObjectSource, TransferOptions, Uploaded
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import for_each

NAME = ".bucketpoint-convert.json"
_NAME_OF_WORKER = ".bucketpoint-convert-{}-of-{}.json"

_VERSION = 1
_MAX_BYTES = 1 << 30

NOTE_BYTES = 64 << 20
NOTE_SECONDS = 5.0
"""Limits on unsaved notes: the journal is stored after this many bytes of complete objects, or this many seconds. The
next run repeats only the objects completed since then, and those that were in flight."""


@dataclass
class Journal:
    """Journal of one conversion to one place.

    Attributes:
        digest: digest of everything that decides the target's bytes. Notes under another digest are of no use.
        token: token of the attempt; the names of its objects may contain it.
        notes: for the path of each written object, its ETag and checksums.
        planned: for the path of each object to be written, its size, and the ETag of an object that was there before.
        stale: the same entries, with the noted ETag, for objects of earlier conversions that did not finish.
        name: name of the journal's object: each worker has its own.
    """

    place: TargetPlace
    digest: str
    token: str
    notes: dict[str, Any] = field(default_factory=dict, repr=False)
    planned: dict[str, Any] = field(default_factory=dict, repr=False)
    stale: dict[str, Any] = field(default_factory=dict, repr=False)
    name: str = NAME
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _unwritten: int = 0
    _written: float = 0.0

    def done(self, objects: Sequence[ObjectSource], options: TransferOptions) -> dict[str, Uploaded]:
        """Return the objects that are at the target, whole and unchanged."""
        done: dict[str, Uploaded] = {}

        def look(entry: ObjectSource) -> None:
            note = self.notes.get(entry.key, {})
            crcs = _checksums(note, entry)
            if crcs is None:
                return
            info = retry_transient(lambda: self.place.head(entry.key), attempts=options.read_attempts)
            # Without an ETag, an object of the same size may be anybody's.
            if info is None or info.etag is None:
                return
            if (info.size, info.etag) == (entry.nbytes, note.get("etag")):
                done[entry.key] = Uploaded(info, crcs, [None] * len(crcs))

        for_each(objects, look, options)
        return done

    def begin(self, objects: Sequence[ObjectSource], stale: Mapping[str, Any]) -> None:
        """Record the objects to be written, before the first of them. Costs a LIST and a PUT, the first time."""
        if not self.planned:
            before = self._there_before([entry.key for entry in objects])
            if before is not None:
                self.planned = {
                    entry.key: {"nbytes": entry.nbytes, "before": before.get(entry.key)} for entry in objects
                }
            self.stale = {**stale, **self.stale}
            self._write()
        self._written = time.monotonic()

    def note(self, entry: ObjectSource, uploaded: Uploaded) -> None:
        """Note an object that has been written. Safe to call from any thread."""
        with self._lock:
            crcs = [list(crcs) for crcs in uploaded.block_crcs]
            self.notes[entry.key] = {"etag": uploaded.info.etag, "crc32c": crcs}
            self._unwritten += max(entry.nbytes, 1)
        self._write_if(NOTE_BYTES, NOTE_SECONDS)

    def flush(self) -> None:
        """Store the journal if it has notes that are not stored yet."""
        self._write_if(1, 0.0)

    def _write_if(self, nbytes: int, seconds: float) -> None:
        def due() -> bool:
            waited = time.monotonic() - self._written >= seconds
            return self._unwritten >= nbytes or (self._unwritten > 0 and waited)

        # The thread that stores the journal checks again afterwards, so that no other thread has to wait here.
        while due() and self._writing.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._writing.release()

    def _write(self) -> None:
        with self._lock:
            content = {"version": _VERSION, "digest": self.digest, "token": self.token, "objects": self.notes}
            body = memoryview(json.dumps({**content, "planned": self.planned, "stale": self.stale}).encode())
            self._unwritten = 0
        self.place.store.put(self.place.key(self.name), [body], crc32c=crc32c(body))
        self._written = time.monotonic()

    def _there_before(self, paths: Sequence[str]) -> dict[str, str | None] | None:
        """Return the ETags of existing objects under the paths to be written; None if listing is denied."""
        if all(keys.parse_data_path(path) for path in paths):
            # These paths contain this attempt's token, so no other object has them.
            return {}
        above = self.place.key("x")[:-1]
        try:
            listed = list(self.place.store.list(above + os.path.commonprefix(paths)))  # noqa: RUF071 (keys)
        except AccessDeniedError:
            return None
        return {info.key[len(above) :]: info.etag for info in listed}

    def leftovers(self) -> dict[str, Any]:
        """Return the objects that this conversion may have left at its target, and the `stale` ones."""
        left = {**self.stale, **self.planned}
        for path, note in self.notes.items():
            left[path] = {**left.get(path, {}), "etag": note.get("etag")}
        return left

    def join(self, workers: int) -> None:
        """Take over the notes of all workers of this conversion."""
        for worker in range(workers):
            name = name_of((worker, workers))
            if name != self.name:
                self.notes.update(open_journal(self.place, self.digest, name)[0].notes)

    def remove(self, workers: int = 1) -> None:
        """Delete the journals of all workers, once the conversion is complete."""
        names = {self.name, *(name_of((worker, workers)) for worker in range(workers))}
        self.place.store.delete([self.place.key(name) for name in sorted(names)])


def name_of(worker: tuple[int, int]) -> str:
    """Return the name of the journal of worker `i` of `n`."""
    return NAME if worker[1] == 1 else _NAME_OF_WORKER.format(*worker)


def open_journal(place: TargetPlace, digest: str, name: str = NAME) -> tuple[Journal, Journal | None]:
    """Open the journal of this conversion, with the notes of earlier runs.

    The second result is the journal of another conversion if one is there instead, else None.
    """
    fresh = Journal(place, digest, keys.new_token(), name=name)
    try:
        data, _ = place.store.get(place.key(name), max_bytes=_MAX_BYTES)
        content = json.loads(data)
    except (ObjectNotFoundError, CorruptDataError, ValueError, RecursionError):
        return fresh, None
    if type(content) is not dict or content.get("version") != _VERSION:
        return fresh, None
    token = content.get("token")
    tables: list[Any] = [content.get("objects"), content.get("planned", {}), content.get("stale", {})]
    if type(token) is not str or not all(map(_is_table, tables)):
        return fresh, None
    notes, planned, stale = tables
    journal = Journal(place, str(content.get("digest")), token, notes, planned, stale, name)
    if journal.digest != digest:
        return fresh, journal
    try:
        keys.data_path(token, 0, "other", 0)
    except ValueError:
        return fresh, None
    return journal, None


def _is_table(value: Any) -> bool:
    return type(value) is dict and all(type(entry) is dict for entry in value.values())


def remove_stale(place: TargetPlace, stale: Mapping[str, Any], kept: Collection[str], options: TransferOptions) -> None:
    """Delete objects that unfinished conversions to this place left, if they are provably theirs.

    An object is theirs if it has the noted ETag; or if it was planned, has appeared since, and has the planned size:
    the journal notes an object only after it is written, so the note may be missing.

    Args:
        kept: paths of the finished conversion, which are not deleted.
    """
    gone: list[str] = []

    def look(path: str) -> None:
        entry = stale[path]
        try:
            info = place.head(path)
        except BucketpointError:
            return
        if info is None or info.etag is None or not keys.may_be_data(path):
            return
        appeared = "before" in entry and info.etag != entry["before"] and info.size == entry.get("nbytes")
        if appeared or info.etag == entry.get("etag"):
            gone.append(place.key(path))

    for_each([path for path in stale if path not in kept], look, options)
    place.store.delete(sorted(gone))


def _checksums(note: Mapping[str, Any], entry: ObjectSource) -> list[list[int]] | None:
    """Return the noted checksums of an object's blocks, or None if their number does not fit the object."""
    noted = note.get("crc32c")
    if type(noted) is not list or len(noted) != len(entry.segments):
        return None
    for crcs, segment in zip(noted, entry.segments, strict=True):
        count = -(-segment.nbytes // segment.block_nbytes) if segment.block_nbytes else 0
        if type(crcs) is not list or len(crcs) != count:
            return None
        if not all(type(crc) is int and 0 <= crc < 1 << 32 for crc in crcs):
            return None
    return noted
