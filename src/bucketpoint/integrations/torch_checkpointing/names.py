"""Conversion of torch_checkpointing's paths to keys and back, the names of objects, and checksums in objects.

A path `a/b` has the key `a/b/`, followed by one of these names of objects:

- `@f.TOKEN.ATTEMPT.RANDOM`: the bytes of a file in a temporary directory. Each write makes a new key, and the newest
  object is the file.
- `@d`: the manifest of a directory that was committed to this path, which names the objects of its files.
- `@o.TOKEN.ATTEMPT.RANDOM`: the bytes of any other file. `@n`: the entry that names the object of such a file.

Version 0.2 wrote all files as `@f.`. It renamed a file by a `@l.TOKEN.ATTEMPT.RANDOM`, JSON that names the object with
the bytes, and marked deleted and moved files by `@dx.TOKEN`. Objects with other names are ignored.

A temporary directory `tmp_a` has the key `a/@tmp/`, so that one listing below `a/` finds a save and its commit.

An object has the file's bytes, a table with the CRC32C of each block of 1 MiB, and 24 bytes: a magic number, the file's
size, a zero, and the CRC32C of the table and these. Checksums are not in the manifest, because the committing rank
lacks those of other ranks; an object for them would cost another PUT.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bucketpoint.errors import CorruptDataError, InvalidURLError, ObjectNotFoundError
from bucketpoint.forks import process_lock
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import Block
from bucketpoint.transfer.checksum import combine, crc32c

Parts = tuple[str, ...]
"""Components of a path below the root; empty for the root itself."""

FILE, MANIFEST, OTHER_FILE, ENTRY, STAGED = "@f.", "@d", "@o.", "@n", "@tmp"
LINK, MARKER = "@l.", "@dx."
VERSION = re.compile(r"@[fl]\.([0-9a-f]{16})\.([A-Za-z0-9_-]*)\.[0-9a-f]{8}")
"""Name of a file's object in a temporary directory, or from version 0.2. Groups: token and attempt."""

_lock = process_lock()
_last = 0


def object_name(kind: str, attempt: str) -> str:
    """Return a new name of an object. Names sort by time, and those of one process in the order of the calls."""
    global _last
    with _lock:
        _last = max(time.time_ns(), _last + 1)
        return f"{kind}{_last:016x}.{attempt}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Names:
    """Paths and keys of one root.

    Attributes:
        root: the root's URL. Paths may begin with this URL, even without the slash that `Path` drops.
        prefix: key prefix of the root.
        temp_dir_prefix: prefix of the names of temporary directories.
    """

    root: str
    prefix: str
    temp_dir_prefix: str

    def parts(self, path: str | os.PathLike[str]) -> Parts:
        """Return the components of a path below the root. Raises InvalidURLError for a path outside the root."""
        text = os.fspath(path)
        folded = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", r"\1:/", text)
        home = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+):/+", r"\1:/", self.root).rstrip("/")
        if home and (folded == home or folded.startswith(home + "/")):
            folded = folded[len(home) :]
        elif re.match(r"^[A-Za-z][A-Za-z0-9+.-]+:/", folded):
            raise InvalidURLError(
                f"{text} is not below the storage's root", url=self.root, remedy="Pass a path relative to the root"
            )
        parts = tuple(part for part in folded.split("/") if part not in ("", "."))
        if ".." in parts:
            raise InvalidURLError(f"{text} has a component ..", url=self.root, remedy="Pass a path without ..")
        return parts

    def temporary(self, parts: Parts) -> Parts:
        """Return the outermost temporary directory at or above a path; empty if there is none."""
        depths = (depth for depth, part in enumerate(parts, 1) if self._rest(part) != part)
        return parts[: next(depths, 0)]

    def key(self, parts: Parts, *behind: str) -> str:
        """Return the key of a path, with `behind` appended."""
        return "/".join((*([self.prefix] if self.prefix else []), *self.components(parts), *behind))

    def components(self, parts: Parts) -> list[str]:
        """Return the components of a path's key, without those of the root."""
        found = []
        for part in parts:
            rest = self._rest(part)
            found.append(f"@{rest}" if rest.startswith("@") else rest)
            if rest != part:
                found.append(STAGED)
        return found

    def _rest(self, part: str) -> str:
        """Return a temporary directory's name without its prefix; any other component unchanged."""
        return part.removeprefix(self.temp_dir_prefix) or part

    def read(self, key: str) -> tuple[Parts, str]:
        """Return the path of a key and the key's last component. The reverse of `key`."""
        *components, name = key[len(self.prefix) :].lstrip("/").split("/")
        parts: list[str] = []
        for component in components:
            if component == STAGED and parts:
                parts[-1] = self.temp_dir_prefix + parts[-1]
            else:
                parts.append(component.removeprefix("@") if component.startswith("@@") else component)
        return tuple(parts), name


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
        manifests = [self._where.key((), *components[:depth], MANIFEST) for depth in range(1, len(components) + 1)]
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
        links = {info.key: self._linked(info.key) for info in infos if f"/{LINK}" in info.key}
        named = {file.key for files in (committed, entries, links) for file in files.values()}
        for info in infos:
            path, name = self._where.read(info.key)
            match = VERSION.fullmatch(name)
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
            if name in (MANIFEST, ENTRY):
                etag, files = self._read.get(info.key, (None, {}))
                if etag is None or etag != info.etag:
                    files = self._decode(info.key, self._store.get(info.key)[0])
                    self._read[info.key] = info.etag, files
                yield path, files

    def known(self, parts: Parts) -> File | None:
        """Return a file that a cached manifest names, without a request; None if there is none."""
        for depth in range(1, len(parts)):
            _, files = self._read.get(self._where.key(parts[:depth], MANIFEST), (None, {}))
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
        inside = key.startswith(prefix) and name.startswith((FILE, OTHER_FILE)) and ".." not in folders
        if not inside or type(size) is not int or not 0 <= size < _MOST_BYTES or not isinstance(etag, str | None):
            raise ValueError("no file below the root")
        return File(key, size, etag)


# -- checksums behind the bytes of a file ------------------------------------------------------------------------------

BLOCK_BYTES = 1 << 20
"""Size of a block: a small read receives and verifies whole blocks. The usual part, 32 MiB, is a multiple."""

_MAGIC = b"BPTCSUM1"
_FOOTER = struct.Struct("<8sQII")


def object_bytes(nbytes: int) -> int:
    """Return the size of the object for a file of `nbytes`."""
    return nbytes + 4 * -(-nbytes // BLOCK_BYTES) + _FOOTER.size


def file_bytes(object_nbytes: int) -> int:
    """Return the size of a file from that of its object. The reverse of `object_bytes`."""
    rest = object_nbytes - _FOOTER.size
    return rest - 4 * -(-rest // (BLOCK_BYTES + 4))


def block_sums(pieces: Iterable[memoryview]) -> list[int]:
    """Return the CRC32C of each block of the pieces' bytes."""
    sums: list[int] = []
    filled = BLOCK_BYTES
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            if filled == BLOCK_BYTES:
                sums.append(0)
                filled = 0
            stretch = piece[taken : taken + BLOCK_BYTES - filled]
            sums[-1] = crc32c(stretch, sums[-1])
            taken += len(stretch)
            filled += len(stretch)
    return sums


def joined(sums: Sequence[int], nbytes: int) -> int:
    """Return the CRC32C of `nbytes` bytes from the sums of their blocks."""
    total = 0
    for index, crc in enumerate(sums):
        total = combine(total, crc, min(BLOCK_BYTES, nbytes - index * BLOCK_BYTES))
    return total


def encode_sums(sums: Sequence[int], nbytes: int) -> bytes:
    """Return the checksums as the bytes that follow a file's bytes in its object."""
    table = struct.pack(f"<{len(sums)}I", *sums)
    head = struct.pack("<8sQI", _MAGIC, nbytes, 0)
    return table + _FOOTER.pack(_MAGIC, nbytes, 0, crc32c(memoryview(table + head)))


@dataclass(frozen=True)
class Sums:
    """Checksums of a file of `nbytes`."""

    nbytes: int
    crcs: Sequence[int]

    @classmethod
    def decode(cls, data: memoryview, nbytes: int, *, url: str, key: str) -> Sums:
        """Decode the checksums of a file of `nbytes`. Raises CorruptDataError if they are damaged or do not fit."""
        table = data[: max(len(data) - _FOOTER.size, 0)]
        right = False
        if len(data) == object_bytes(nbytes) - nbytes:
            magic, written, zero, crc = _FOOTER.unpack(data[len(table) :])
            head = struct.pack("<8sQI", magic, written, zero)
            right = (magic, written) == (_MAGIC, nbytes) and crc == crc32c(memoryview(bytes(table) + head))
        if not right:
            raise CorruptDataError("The checksums of a file are damaged", url=url, key=key)
        return cls(nbytes, struct.unpack(f"<{len(table) // 4}I", table))

    def blocks(self, start: int, stop: int) -> list[Block]:
        """Return the checksums of the bytes `[start, stop)`, a range of whole blocks."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        return [
            Block(min(BLOCK_BYTES, self.nbytes - index * BLOCK_BYTES), self.crcs[index]) for index in range(first, last)
        ]
