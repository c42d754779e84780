"""Files below a path, from one listing, its manifests and entries, and the manifests above the path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError
from bucketpoint.integrations.torch_checkpointing import names
from bucketpoint.integrations.torch_checkpointing.names import Names, Parts
from bucketpoint.integrations.torch_checkpointing.sums import file_bytes
from bucketpoint.stores import ObjectInfo, Store, delete_all
from bucketpoint.transfer.checksum import crc32c

_FORMAT = "bucketpoint torch_checkpointing 2"
_READ = (_FORMAT, "bucketpoint torch_checkpointing 1")
_MOST_BYTES = 1 << 50
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class File:
    """A file: its object as the store described it after the write."""

    key: str
    object_nbytes: int
    etag: str | None

    @property
    def nbytes(self) -> int:
        return file_bytes(self.object_nbytes)


Files = dict[Parts, File]


def encode(files: Files) -> bytes:
    """Encode the manifest of a directory, with files by relative path, or the entry of a file, whose path is empty."""
    rows = [["/".join(path), one.key, one.object_nbytes, one.etag] for path, one in sorted(files.items())]
    body = json.dumps({"format": _FORMAT, "files": rows}, indent=1).encode()
    return b"%08x\n" % crc32c(memoryview(body)) + body


class Trees:
    """Reader of trees of files, with a cache of manifests and entries by key and ETag.

    With `attempt`, files of other runs in temporary directories are ignored.
    """

    def __init__(self, store: Store, where: Names, attempt: str) -> None:
        self._store = store
        self._where = where
        self._attempt = attempt
        self._read: dict[str, tuple[str | None, Files]] = {}

    def files(self, parts: Parts, infos: Sequence[ObjectInfo] | None = None) -> Files:
        """Return the files at or below a path, by absolute path. `infos` is the path's listing, if already made."""
        found = self.read(self.listing(parts) if infos is None else infos)
        return {path: file for path, file in found.items() if path[: len(parts)] == parts}

    def listing(self, parts: Parts) -> list[ObjectInfo]:
        """List the objects below a path, and the manifests of the directories above it."""
        components = self._where.components(parts)
        manifests = [
            self._where.key((), *components[:depth], names.MANIFEST) for depth in range(1, len(components) + 1)
        ]
        infos = [info for key in manifests[:-1] for info in self._store.list(key)]
        top = self._where.key(parts)
        infos += self._store.list(f"{top}/" if top else "")
        # `known` reads the cache: drop deleted manifests.
        for key in set(manifests) - {info.key for info in infos}:
            self._read.pop(key, None)
        return infos

    def read(self, infos: Iterable[ObjectInfo]) -> Files:
        """Return the files that objects contain or name, by absolute path."""
        infos = list(infos)
        committed: Files = {}
        entries: Files = {}
        newest: dict[Parts, tuple[str, str, File]] = {}
        for path, files in self.manifests(infos):
            (entries if () in files else committed).update({path + below: file for below, file in files.items()})
        links = {info.key: self._linked(info.key) for info in infos if f"/{names.LINK}" in info.key}
        named = {file.key for files in (committed, entries, links) for file in files.values()}
        for info in infos:
            path, name = self._where.read(info.key)
            match = names.VERSION.fullmatch(name)
            if match is None or match[1] < newest.get(path, ("",))[0]:
                continue
            if match[2] == self._attempt or not self._attempt or not self._where.temporary(path):
                file = links.get(info.key) or File(info.key, info.size, info.etag)
                newest[path] = match[1], info.key, file
        # Files written into a committed directory are newer than its manifest.
        return committed | {path: file for path, (_, key, file) in newest.items() if key not in named} | entries

    def manifests(self, infos: Iterable[ObjectInfo]) -> Iterator[tuple[Parts, Files]]:
        """Read the manifests and entries among objects. Raises CorruptDataError if one of them is damaged."""
        for info in infos:
            path, name = self._where.read(info.key)
            if name in (names.MANIFEST, names.ENTRY):
                etag, files = self._read.get(info.key, (None, {}))
                if etag is None or etag != info.etag:
                    files = self._decode(info.key, self._store.get(info.key)[0])
                    self._read[info.key] = info.etag, files
                yield path, files

    def known(self, parts: Parts) -> File | None:
        """Return a file that a cached manifest names, without a request; None if there is none."""
        for depth in range(1, len(parts)):
            _, files = self._read.get(self._where.key(parts[:depth], names.MANIFEST), (None, {}))
            if parts[depth:] in files:
                return files[parts[depth:]]
        return None

    def forget(self) -> None:
        """Empty the cache, because a file that a manifest names may have been replaced."""
        self._read.clear()

    def own(self, key: str) -> bytes | None:
        """Read a manifest or entry from the store, not the cache. Return None if there is none."""
        try:
            return self._store.get(key)[0]
        except ObjectNotFoundError:
            return None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Raises StoreError if the store refused to delete some of them."""
        delete_all(self._store, keys)

    def _decode(self, key: str, data: bytes) -> Files:
        crc, _, body = data.partition(b"\n")
        if crc != b"%08x" % crc32c(memoryview(body)):
            raise CorruptDataError("The manifest of a checkpoint is damaged", url=self._store.url, key=key)
        try:
            document = json.loads(body)
            if document["format"] not in _READ:
                raise CorruptDataError(
                    f"The manifest of a checkpoint has the format {document['format']!r}",
                    url=self._store.url,
                    key=key,
                    remedy="Install the bucketpoint that wrote it, or a newer one",
                )
            return {tuple(path.split("/")) if path else (): self._named(*row) for path, *row in document["files"]}
        except _MALFORMED as error:
            raise CorruptDataError("The manifest of a checkpoint is malformed", url=self._store.url, key=key) from error

    def _linked(self, key: str) -> File:
        """Return the file that a link of version 0.2 names."""
        try:
            document = json.loads(self._store.get(key)[0])
            return self._named(document["key"], document["size"], document["etag"])
        except _MALFORMED as error:
            raise CorruptDataError("The link to a file is malformed", url=self._store.url, key=key) from error

    def _named(self, key: Any, size: Any, etag: Any) -> File:
        """Return a file that a manifest names. Raises ValueError if its object is not below this root."""
        prefix = f"{self._where.prefix}/" if self._where.prefix else ""
        *folders, name = key.split("/")
        inside = key.startswith(prefix) and name.startswith((names.FILE, names.OTHER_FILE)) and ".." not in folders
        if not inside or type(size) is not int or not 0 <= size < _MOST_BYTES or not isinstance(etag, str | None):
            raise ValueError("no file below the root")
        return File(key, size, etag)
