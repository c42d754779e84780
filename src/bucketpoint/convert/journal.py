"""The journal of a conversion, beside its target: planned objects, complete objects, and their checksums.

The journal alone is no proof: an object counts as done only while the store reports the right size and the noted ETag.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.catalog.catalog import get_metadata
from bucketpoint.convert.target import TargetPlace, is_of_conversion
from bucketpoint.errors import CorruptDataError, MetadataError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.stores import delete_all
from bucketpoint.stores.retry import retry_transient
from bucketpoint.transfer import ObjectSource, TransferOptions, Uploaded
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import for_each

NAME = ".bucketpoint-convert.json"
_NAME_OF_WORKER = ".bucketpoint-convert-{}-of-{}.json"

_VERSION = 2
_MAX_BYTES = 1 << 30

NOTE_BYTES = 64 << 20
NOTE_SECONDS = 5.0
"""Limits on unsaved notes: the journal is stored after this many bytes of complete objects, or this many seconds. The
next run repeats only objects that were in flight, or completed after the journal was last stored."""


@dataclass
class Journal:
    """Journal of one conversion to one place.

    Attributes:
        digest: digest of everything that determines the target's bytes. Notes of another digest are not used.
        token: token of the attempt; the names of its objects may contain it.
        notes: ETag and checksums of each written object, by path.
        planned: paths of the objects to be written.
        stale: paths of objects of earlier conversions that did not finish.
        name: name of the journal's object: each worker has its own.
    """

    place: TargetPlace
    digest: str
    token: str
    notes: dict[str, Any] = field(default_factory=dict, repr=False)
    planned: set[str] = field(default_factory=set, repr=False)
    stale: set[str] = field(default_factory=set, repr=False)
    name: str = NAME
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _unwritten: int = 0
    _written: float = 0.0

    def done(self, objects: Sequence[ObjectSource], options: TransferOptions) -> dict[str, Uploaded]:
        """Return the objects that are complete and unchanged at the target."""
        done: dict[str, Uploaded] = {}

        def look(entry: ObjectSource) -> None:
            note = self.notes.get(entry.key, {})
            crcs = _checksums(note, entry)
            if crcs is None:
                return
            info = retry_transient(lambda: self.place.head(entry.key), attempts=options.read_attempts)
            # Without an ETag, another process may have written an object of the same size.
            if info is None or info.etag is None:
                return
            if (info.size, info.etag) == (entry.nbytes, note.get("etag")):
                done[entry.key] = Uploaded(info, crcs, [None] * len(crcs))

        for_each(objects, look, options)
        return done

    def is_committed(self) -> bool:
        """Return True if an earlier run committed the checkpoint, but did not delete its journal."""
        if not self.notes:
            return False
        try:
            data, _ = get_metadata(self.place.store, self.place.key(keys.METADATA))
        except (ObjectNotFoundError, CorruptDataError, MetadataError):
            return False
        return bool(extra(decode_metadata(data, url=self.place.url)).get("token") == self.token)

    def begin(self, objects: Sequence[ObjectSource]) -> None:
        """Record the objects to be written, before the first is written. The first call costs a PUT."""
        if not self.planned:
            self.planned = {entry.key for entry in objects}
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
            paths = {"planned": sorted(self.planned), "stale": sorted(self.stale)}
            body = memoryview(json.dumps({**content, **paths}).encode())
            self._unwritten = 0
        self.place.store.put(self.place.key(self.name), [body], crc32c=crc32c(body))
        self._written = time.monotonic()

    def leftovers(self) -> set[str]:
        """Return the paths of the objects that this and earlier conversions may have left at the target."""
        return {*self.stale, *self.planned, *self.notes}

    def join(self, workers: int) -> None:
        """Add the notes of all workers of this conversion, and the leftovers of earlier conversions."""
        for worker in range(workers):
            name = name_of((worker, workers))
            if name != self.name:
                journal, _ = open_journal(self.place, self.digest, name)
                self.notes.update(journal.notes)
                self.stale |= journal.leftovers()

    def remove(self, workers: int = 0) -> None:
        """Delete this journal, and those of all workers."""
        names = {self.name, *(name_of((worker, workers)) for worker in range(workers))}
        delete_all(self.place.store, [self.place.key(name) for name in sorted(names)])


def name_of(worker: tuple[int, int]) -> str:
    """Return the name of a worker's journal."""
    return NAME if worker[1] == 1 else _NAME_OF_WORKER.format(*worker)


def open_journal(place: TargetPlace, digest: str, name: str = NAME) -> tuple[Journal, Journal | None]:
    """Return the journal of this conversion, with the notes of earlier runs, or a new one.

    The second result is the journal of another conversion if the target has such a journal, else None.
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
    notes: Any = content.get("objects")
    paths: list[Any] = [content.get("planned"), content.get("stale")]
    if type(token) is not str or not _is_table(notes) or not all(map(_are_paths, paths)):
        return fresh, None
    journal = Journal(place, str(content.get("digest")), token, notes, set(paths[0]), set(paths[1]), name)
    if journal.digest != digest:
        fresh.stale = journal.leftovers()
        return fresh, journal
    return (journal if keys.is_token(token) else fresh), None


def _is_table(value: Any) -> bool:
    return type(value) is dict and all(type(entry) is dict for entry in value.values())


def _are_paths(value: Any) -> bool:
    return type(value) is list and all(type(path) is str for path in value)


def remove_stale(place: TargetPlace, stale: Collection[str]) -> None:
    """Delete the objects of unfinished conversions to this place: only at paths that no other writer uses."""
    delete_all(place.store, [place.key(path) for path in sorted(stale) if is_of_conversion(path)])


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
