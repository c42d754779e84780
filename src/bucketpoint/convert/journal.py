"""What an interrupted conversion has done, beside its target: objects that are whole, and the checksums of their bytes.

A note and not the truth: an object counts only while the store says of it what it said when it was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.convert.target import TargetObject
from bucketpoint.errors import BucketpointError, CorruptDataError, ObjectNotFoundError
from bucketpoint.format import keys
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import TransferOptions, Uploaded, retry_transient
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import each

NAME = ".bucketpoint-convert.json"

_VERSION = 1
_MAX_BYTES = 1 << 30


@dataclass
class Journal:
    """One conversion to one place.

    Attributes:
        digest: of all that decides about the target's bytes. Another conversion's notes are of no use.
        token: of the attempt, which the names of its objects may hold.
        notes: of each object that was written, by its path.
    """

    store: Store
    prefix: str
    digest: str
    token: str
    notes: dict[str, Any] = field(default_factory=dict, repr=False)

    def done(self, objects: Sequence[TargetObject], options: TransferOptions) -> dict[str, Uploaded]:
        """The objects that are at the target, whole and unchanged."""
        found: dict[str, Uploaded] = {}

        def look(entry: TargetObject) -> None:
            note = self.notes.get(entry.path, {})
            crcs = _checksums(note, entry)
            if crcs is None:
                return
            key = keys.join(self.prefix, entry.path)
            try:
                info = retry_transient(lambda: self.store.head(key), attempts=options.read_attempts)
            except ObjectNotFoundError:
                return
            # Without an ETag an object of that size may be anybody's.
            if info.etag is not None and (info.size, info.etag) == (entry.nbytes, note.get("etag")):
                found[entry.path] = Uploaded(info, crcs)

        each(objects, look, options)
        return found

    def add(self, objects: Sequence[TargetObject], uploaded: Sequence[Uploaded]) -> None:
        """Note objects that are there."""
        for entry, done in zip(objects, uploaded, strict=True):
            self.notes[entry.path] = {"etag": done.info.etag, "crc32c": [list(crcs) for crcs in done.block_crcs]}
        content = {"version": _VERSION, "digest": self.digest, "token": self.token, "objects": self.notes}
        body = memoryview(json.dumps(content, sort_keys=True).encode())
        self.store.put(self._key, [body], crc32c=crc32c(body))

    def remove(self) -> None:
        """The conversion is complete."""
        self.store.delete([self._key])

    @property
    def _key(self) -> str:
        return keys.join(self.prefix, NAME)


def open_journal(store: Store, prefix: str, digest: str) -> tuple[Journal, Journal | None]:
    """The journal of this conversion, with what it has done before; and another conversion's that is there instead."""
    fresh = Journal(store, prefix, digest, keys.new_token())
    try:
        data, _ = store.get(keys.join(prefix, NAME), max_bytes=_MAX_BYTES)
        content = json.loads(data)
    except (ObjectNotFoundError, CorruptDataError, ValueError, RecursionError):
        return fresh, None
    if type(content) is not dict or content.get("version") != _VERSION:
        return fresh, None
    token, notes = content.get("token"), content.get("objects")
    if type(token) is not str or type(notes) is not dict or not all(type(note) is dict for note in notes.values()):
        return fresh, None
    found = Journal(store, prefix, str(content.get("digest")), token, notes)
    if found.digest != digest:
        return fresh, found
    try:
        keys.data_path(token, 0, "other", 0)
    except ValueError:
        return fresh, None
    return found, None


def remove_leftovers(other: Journal, options: TransferOptions) -> None:
    """Delete what another conversion to the same place left, as far as it is what that wrote. Not after a commit."""
    gone: list[str] = []

    def look(path: str) -> None:
        try:
            key = keys.join(other.prefix, path)
            info: ObjectInfo = other.store.head(key)
        except BucketpointError:
            return
        if info.etag is not None and info.etag == other.notes[path].get("etag"):
            gone.append(key)

    each(other.notes, look, options)
    other.store.delete(sorted(gone))
    other.remove()


def _checksums(note: Mapping[str, Any], entry: TargetObject) -> list[list[int]] | None:
    """The checksums of an object's blocks as they were noted, if there are as many as it has."""
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
