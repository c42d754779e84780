"""The files below a path, from one listing, the manifests and links in it, and the manifests above the path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bucketpoint.errors import CorruptDataError, ObjectNotFoundError
from bucketpoint.integrations.torch_checkpointing import names
from bucketpoint.integrations.torch_checkpointing.names import Names, Parts
from bucketpoint.integrations.torch_checkpointing.sums import file_bytes
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer.checksum import crc32c

_FORMAT = "bucketpoint torch_checkpointing 1"


@dataclass(frozen=True)
class File:
    """A file: its object, and the token by which the newest of several objects is found.

    Attributes:
        attempt: name of the run that wrote the object; empty if a manifest or a link names it.
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


@dataclass
class Listing:
    """Objects below a key prefix, sorted by what they say of files."""

    versions: dict[Parts, list[File]] = field(default_factory=dict)
    links: dict[Parts, list[ObjectInfo]] = field(default_factory=dict)
    manifests: dict[Parts, ObjectInfo] = field(default_factory=dict)
    markers: list[tuple[Parts, str]] = field(default_factory=list)

    def take(self, where: Names, infos: Iterable[ObjectInfo]) -> None:
        for info in infos:
            path, name = where.read(info.key)
            if name.startswith(names.FILE):
                token, attempt, _ = name[len(names.FILE) :].split(".")
                self.versions.setdefault(path, []).append(File(info.key, info.size, info.etag, token, attempt))
            elif name.startswith(names.LINK):
                self.links.setdefault(path, []).append(info)
            elif name.startswith(names.MARKER):
                self.markers.append((path, name[len(names.MARKER) :]))
            elif name == names.MANIFEST:
                self.manifests[path] = info


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
        gone = list(listing.markers)
        newest: Files = {}

        def offer(path: Parts, one: File) -> None:
            if path[: len(parts)] == parts and (path not in newest or newest[path].token < one.token):
                newest[path] = one

        for path, versions in listing.versions.items():
            for version in versions:
                if not attempt or version.attempt == attempt:
                    offer(path, version)
        for path, infos in listing.links.items():
            if path[: len(parts)] == parts:
                # The last one is the newest: they are listed in the order of their tokens.
                document = json.loads(self._bytes(infos[-1]))
                token = infos[-1].key.rpartition(names.LINK)[2].split(".")[0]
                offer(path, File(document["key"], document["size"], document["etag"], token))
        for path, info in listing.manifests.items():
            manifest = self.manifest(info)
            gone.append((manifest.source, manifest.token))
            for relative, one in manifest.files.items():
                offer(path + relative, one)
        return {
            path: one
            for path, one in newest.items()
            if not any(path[: len(above)] == above and one.token < token for above, token in gone)
        }

    def manifest(self, info: ObjectInfo) -> Manifest:
        """Read a manifest. Raises CorruptDataError."""
        crc, _, body = self._bytes(info).partition(b"\n")
        if crc != b"%08x" % crc32c(memoryview(body)):
            raise CorruptDataError("The manifest of a checkpoint is damaged", url=self._store.url, key=info.key)
        document = json.loads(body)
        if document["format"] != _FORMAT:
            raise CorruptDataError(
                f"The manifest of a checkpoint has the format {document['format']!r}",
                url=self._store.url,
                key=info.key,
                remedy="Install the bucketpoint that wrote it, or a newer one",
            )
        token = document["token"]
        files = {tuple(path.split("/")): File(key, size, etag, token) for path, key, size, etag in document["files"]}
        return Manifest(token, tuple(document["source"].split("/")), files)

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
