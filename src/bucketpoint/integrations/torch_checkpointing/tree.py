"""The files below a path, from one listing, the manifests and links in it, and the manifests above the path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError
from bucketpoint.integrations.torch_checkpointing import names
from bucketpoint.integrations.torch_checkpointing.names import Names, Parts
from bucketpoint.integrations.torch_checkpointing.sums import file_bytes
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer.checksum import crc32c

_FORMAT = "bucketpoint torch_checkpointing 1"
_MOST_BYTES = 1 << 50
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class File:
    """A file: its object, and the token by which the newest of several objects is found.

    Attributes:
        attempt: name of the run that wrote the object; empty if a manifest names it.
    """

    key: str
    object_nbytes: int
    etag: str | None
    token: str
    attempt: str = ""

    @property
    def nbytes(self) -> int:
        return file_bytes(self.object_nbytes)


Files = dict[Parts, File]


@dataclass(frozen=True)
class Manifest:
    """A commit: the files of a directory, relative to it, and the directory that they were written to."""

    token: str
    source: Parts
    files: Mapping[Parts, File]

    def encode(self) -> bytes:
        """Return the bytes of the manifest, the CRC32C of the rest in its first line."""
        rows = [["/".join(path), one.key, one.object_nbytes, one.etag] for path, one in sorted(self.files.items())]
        document = {"format": _FORMAT, "token": self.token, "source": "/".join(self.source), "files": rows}
        body = json.dumps(document, indent=1).encode()
        return b"%08x\n" % crc32c(memoryview(body)) + body


@dataclass(frozen=True)
class NamedNote:
    """A link or a marker at a path."""

    path: Parts
    token: str
    attempt: str
    info: ObjectInfo

    @property
    def folder(self) -> str:
        """Prefix of the keys of the path."""
        return self.info.key.rpartition("/")[0] + "/"


@dataclass
class Listing:
    """Objects below a key prefix, sorted by what they say of files."""

    versions: dict[Parts, list[File]] = field(default_factory=dict)
    links: dict[Parts, list[NamedNote]] = field(default_factory=dict)
    manifests: dict[Parts, ObjectInfo] = field(default_factory=dict)
    markers: list[NamedNote] = field(default_factory=list)

    def take(self, where: Names, infos: Iterable[ObjectInfo]) -> None:
        for info in infos:
            path, name = where.read(info.key)
            match = names.TOKEN_NAME.fullmatch(name)
            if match is None:
                if name == names.MANIFEST:
                    self.manifests[path] = info
                continue
            kind, token, attempt = match.groups(default="")
            if kind == names.FILE:
                self.versions.setdefault(path, []).append(File(info.key, info.size, info.etag, token, attempt))
            elif kind == names.LINK:
                self.links.setdefault(path, []).append(NamedNote(path, token, attempt, info))
            else:
                self.markers.append(NamedNote(path, token, attempt, info))


class Trees:
    """Reads trees of files. Keeps manifests that it has read: a manifest with the same ETag is the same."""

    def __init__(self, store: Store, where: Names) -> None:
        self._store = store
        self._where = where
        self._read: dict[tuple[str, str], bytes] = {}

    def listing(self, parts: Parts, *, above: bool = True) -> Listing:
        """List what is below the key of a path, and the manifests and markers of the directories above it.

        Args:
            above: False if what is above need not be known. Saves a request for each directory.
        """
        found = Listing()
        components = self._where.components(parts)
        for depth in range(1, len(components) if above else 1):
            folder = "/".join(([self._where.prefix] if self._where.prefix else []) + components[:depth])
            found.take(self._where, self._store.list(f"{folder}/{names.MANIFEST}"))
        top = self._where.key(parts)
        found.take(self._where, self._store.list(f"{top}/" if top else ""))
        return found

    def files(self, listing: Listing, parts: Parts, *, attempt: str = "") -> Files:
        """Return the files at or below a path, with absolute paths.

        Args:
            attempt: if given, only files that this run wrote.
        """
        gone: dict[Parts, str] = {}
        newest: Files = {}

        def hide(path: Parts, token: str) -> None:
            gone[path] = max(gone.get(path, ""), token)

        def offer(path: Parts, one: File) -> None:
            if path[: len(parts)] == parts and (path not in newest or newest[path].token < one.token):
                newest[path] = one

        for path, versions in listing.versions.items():
            for version in versions:
                if not attempt or version.attempt == attempt:
                    offer(path, version)
        for path, links in listing.links.items():
            # The last one is the newest: they are listed in the order of their tokens.
            for link in [link for link in links if not attempt or link.attempt == attempt][-1:]:
                if path[: len(parts)] == parts:
                    offer(path, self._linked(link))
        for marker in listing.markers:
            if not marker.info.size:
                hide(marker.path, marker.token)
        for path, info in listing.manifests.items():
            manifest = self.manifest(info)
            hide(manifest.source, manifest.token)
            for relative, one in manifest.files.items():
                offer(path + relative, one)
        return {
            path: one
            for path, one in newest.items()
            if all(one.token >= gone.get(path[:depth], "") for depth in range(len(path) + 1))
        }

    def newest(self, listing: Listing) -> str:
        """Return the newest token in a listing, whose machine's clock may be ahead of this one's."""
        tokens = [one.token for versions in listing.versions.values() for one in versions]
        tokens += [link.token for links in listing.links.values() for link in links]
        tokens += [marker.token for marker in listing.markers]
        tokens += [self.manifest(info).token for info in listing.manifests.values()]
        return max(tokens, default="")

    def manifest(self, info: ObjectInfo) -> Manifest:
        """Read a manifest. Raises CorruptDataError."""
        crc, _, body = self._bytes(info).partition(b"\n")
        if crc != b"%08x" % crc32c(memoryview(body)):
            raise CorruptDataError("The manifest of a checkpoint is damaged", url=self._store.url, key=info.key)
        try:
            document = json.loads(body)
            if document["format"] != _FORMAT:
                raise CorruptDataError(
                    f"The manifest of a checkpoint has the format {document['format']!r}",
                    url=self._store.url,
                    key=info.key,
                    remedy="Install the bucketpoint that wrote it, or a newer one",
                )
            token, source = document["token"], tuple(document["source"].split("/"))
            if not names.TOKEN_NAME.fullmatch(names.MARKER + token):
                raise ValueError("no token")
            files = {
                tuple(path.split("/")): self._named(key, size, etag, token)
                for path, key, size, etag in document["files"]
            }
        except _MALFORMED as error:
            raise CorruptDataError(
                "The manifest of a checkpoint is malformed", url=self._store.url, key=info.key
            ) from error
        return Manifest(token, source, files)

    def _linked(self, link: NamedNote) -> File:
        try:
            document = json.loads(self._bytes(link.info))
            return self._named(document["key"], document["size"], document["etag"], link.token)
        except _MALFORMED as error:
            raise CorruptDataError("The link to a file is malformed", url=self._store.url, key=link.info.key) from error

    def _named(self, key: Any, size: Any, etag: Any, token: str) -> File:
        """Return a file that a manifest or a link names. Raises ValueError if its object is none of this root's."""
        prefix = f"{self._where.prefix}/" if self._where.prefix else ""
        *folders, name = key.split("/")
        inside = key.startswith(prefix) and name.startswith(names.FILE) and ".." not in folders
        if not inside or type(size) is not int or not 0 <= size < _MOST_BYTES or not isinstance(etag, str | None):
            raise ValueError("no file below the root")
        return File(key, size, etag, token)

    def own_manifest(self, key: str) -> bytes | None:
        """Return the bytes of a manifest as they are now, or None if there is none."""
        try:
            return self._store.get(key)[0]
        except ObjectNotFoundError:
            return None

    def _bytes(self, info: ObjectInfo) -> bytes:
        kept = (info.key, info.etag or "")
        if info.etag is None or kept not in self._read:
            self._read[kept] = self._store.get(info.key)[0]
        return self._read[kept]
