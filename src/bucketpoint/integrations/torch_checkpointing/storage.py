"""`BucketStorage`: the files of torch_checkpointing as objects of a store.

A save writes its files to a temporary directory and renames that. Here the rename is one conditional PUT of a manifest,
which names the objects that exist already. `names` has the keys, `tree` the files, and `sums` the checksums.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from bucketpoint.dcp.saving.commit_info import CommitInfo, OnCommit, tell
from bucketpoint.errors import (
    BucketpointError,
    CheckpointExistsError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from bucketpoint.integrations.torch_checkpointing import names, read_stream, removal
from bucketpoint.integrations.torch_checkpointing.names import Names, Parts
from bucketpoint.integrations.torch_checkpointing.read_stream import ReadStream
from bucketpoint.integrations.torch_checkpointing.removal import delete_all
from bucketpoint.integrations.torch_checkpointing.tree import File, Files, Listing, Manifest, Trees
from bucketpoint.integrations.torch_checkpointing.write_stream import Owners, WriteStream
from bucketpoint.stores import ObjectInfo, as_url, open_store, parse_url, proven
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c


class OccupiedError(CheckpointExistsError, FileExistsError):
    """A rename found files at its destination. Nothing there was changed."""

    remedy_default = "Save under another name, or delete the destination with the storage's rmdir first"


class MissingFileError(ObjectNotFoundError, FileNotFoundError):
    """There is no such file below the storage's root."""


@dataclass
class BucketStorageConfig(StorageConfig):
    """Settings of a `BucketStorage`. They can be pickled, into the process that writes.

    Attributes:
        root: URL below which all paths are resolved: `s3://`, `gs://`, `memory://`, a local path, or another scheme of
            fsspec.
        storage_options: as for `BucketWriter`. They are not part of the `repr`.
        attempt: name that all ranks of this run share, and no run before it. A commit then takes only files of this
            run, and none that a killed run left in the temporary directory: see `for_this_run`. Empty: the newest file
            of each name, whichever run wrote it.
        transfer: sizes and parallelism of requests.
        temp_dir_prefix: that of the `CheckpointWriterConfig`.
        on_commit: called on the rank that commits, in the process that writes, with a `CommitInfo`. Its `step` is None,
            and its `blocked_s` nan: a storage knows neither.

    Raises:
        InvalidURLError: `root` is no URL of a store.
        BucketpointError: `attempt` cannot be part of a key.
    """

    root: str
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    attempt: str = ""
    transfer: TransferOptions = field(default_factory=TransferOptions)
    temp_dir_prefix: str = "tmp_"
    on_commit: OnCommit | None = None

    def __post_init__(self) -> None:
        parse_url(self.root)
        if not re.fullmatch("[A-Za-z0-9_-]*", self.attempt):
            raise BucketpointError(
                f"attempt={self.attempt!r} cannot be part of a key", remedy="Use letters, digits, - and _"
            )

    @classmethod
    def for_this_run(cls, root: str, storage_options: dict[str, Any] | None = None, **more: Any) -> BucketStorageConfig:
        """Return settings with an `attempt` that rank 0 draws. All ranks of the default process group call this."""
        drawn = [secrets.token_hex(8)]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(drawn, src=0)
        return cls(root, storage_options, attempt=drawn[0], **more)

    def create_storage(self) -> BucketStorage:
        return BucketStorage(self)


class BucketStorage(Storage):
    """Files and directories below a URL. Safe to use from several threads.

    A directory is there while a file is below it; one of `mkdir` only in the process that made it, without a request.

    Args:
        config: its settings.
    """

    def __init__(self, config: BucketStorageConfig) -> None:
        self._config = config
        self._url = as_url(config.root) or config.root
        self.store, prefix = open_store(self._url, storage_options=config.storage_options)
        self.where = Names(self._url, prefix, config.temp_dir_prefix)
        self.trees = Trees(self.store, self.where)
        self._files = read_stream.Files(self.store, config.transfer)
        self._lock = threading.Lock()
        self._made: set[Parts] = set()
        self._begun: dict[Parts, float] = {}
        self._written: set[Parts] = set()
        # Files of committed directories, since `exists` of the directory was asked for.
        self._views: dict[Parts, Files] = {}

    def __repr__(self) -> str:
        return f"BucketStorage({self._url!r})"

    # Ranges are received in parallel by the read itself, so one reader of the whole file is enough.
    @property
    def mmap_fill_workers(self) -> int | None:
        return 1

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        file = self._file(path)
        with self._missing(path):
            if read_args is None or read_args.pre_read_full_file or file.object_nbytes <= read_stream.WHOLE_BYTES:
                return ReadStream(self._files, file, self._files.whole(file))
            self._files.sums(file)
            return ReadStream(self._files, file)

    def stream_write(self, path: Path) -> io.IOBase:
        return self._stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        return self._stream(path, Owners(data))

    def write(self, path: Path, data: Any) -> None:
        with self._stream(path, None) as stream:
            stream.write(data)

    def delete(self, path: Path) -> None:
        parts = self.where.parts(path)
        listing = self.trees.listing(parts)
        found = self.trees.files(listing, parts)
        if parts not in found:
            if found:
                raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
            raise self._missing_error(path)
        self._remove(listing, parts, found)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        parts = self.where.parts(path)
        if not recursive and self.exists(path):
            raise FileExistsError(errno.EEXIST, "exists already", str(path))
        with self._lock:
            self._made |= {parts[:depth] for depth in range(1, len(parts) + 1)}

    def rmdir(self, path: Path) -> None:
        """Delete a directory with all that is below it. A checkpoint is gone as a whole once its manifest is."""
        parts = self.where.parts(path)
        if not parts:
            raise OSError(errno.EINVAL, "the root cannot be deleted")
        listing = self.trees.listing(parts)
        found = self.trees.files(listing, parts)
        if parts in found:
            raise NotADirectoryError(errno.ENOTDIR, "is a file", str(path))
        if not found and not self._is_made(parts):
            raise self._missing_error(path)
        self._remove(listing, parts, found)
        with self._lock:
            self._made = {made for made in self._made if made[: len(parts)] != parts}

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Rename a file or a directory, without copying or deleting an object.

        Raises:
            OccupiedError: there is something at the destination, or another process commits to it.
            MissingFileError: there is nothing at the source.
        """
        source, target = self.where.parts(src_path), self.where.parts(dst_path)
        if not source or not target:
            raise OSError(errno.EINVAL, "the root cannot be renamed or replaced")
        if target != source and target[: len(source)] == source:
            raise OSError(errno.EINVAL, "a directory cannot be moved into itself", str(src_path))
        behind, before = self.where.components(source), self.where.components(target)
        staged = behind == [*before, names.STAGED]
        # A temporary directory lies below the key of its destination, so one listing has both.
        there = self.trees.listing(target, above=not staged)
        here = there if staged else self.trees.listing(source)
        files = self.trees.files(here, source, attempt=self._config.attempt if behind[-1] == names.STAGED else "")
        if not files:
            raise self._missing_error(src_path)
        if source == target:
            return
        occupied = self.trees.files(there, target)
        token = names.next_token(max(self.trees.newest(there), self.trees.newest(here)))
        marker = None
        if not staged or source in files:
            marker = self.where.key(source, names.MARKER + names.next_token(token))
        if source in files:
            if (occupied and target not in occupied) or (not occupied and self._is_made(target)):
                raise self._occupied(dst_path)
        elif occupied:
            raise self._occupied(dst_path)
        if marker is not None:
            # A deletion of the source then leaves the objects alone, also if this process is killed after its commit.
            self.store.put(marker, [memoryview(b"begun")])
        if source in files:
            self._link(files[source], target, token)
        else:
            moved = {path[len(source) :]: file for path, file in files.items()}
            self._commit(Manifest(token, source, moved), target, dst_path, there.manifests.get(target))
        if marker is not None:
            self.store.put(marker, [])
        self._forget(source)
        with self._lock:
            self._made = {made for made in self._made if made[: len(source)] != source}

    def ls(self, path: Path) -> list[str]:
        parts = self.where.parts(path)
        found: set[str] = set()
        key = self.where.key(parts)
        if parts:
            listing = self.trees.listing(parts)
            files = self.trees.files(listing, parts)
            if parts in files:
                raise NotADirectoryError(errno.ENOTDIR, "is a file", str(path))
            found = {one[len(parts)] for one in files}
        else:
            # Below the root may be many checkpoints. Only what was never committed is listed to its end.
            for folder in self.store.list_folders(f"{key}/" if key else ""):
                child = self.where.path([folder[:-1].rpartition("/")[2]])
                listing = Listing()
                listing.take(self.where, self.store.list(f"{folder}{names.MANIFEST}"))
                try:
                    if not self.trees.files(listing, child):
                        listing = self.trees.listing(child)
                    found |= {one[0] for one in self.trees.files(listing, ())}
                except CorruptDataError:
                    # Reading it raises. The others can be found.
                    found.add(child[0])
        with self._lock:
            found |= {made[len(parts)] for made in self._made if len(made) > len(parts) and made[: len(parts)] == parts}
        if parts and not found and not self._is_made(parts):
            raise self._missing_error(path)
        return sorted(found)

    def exists(self, path: Path) -> bool:
        parts = self.where.parts(path)
        with self._lock:
            # A rank asks this between its last write and the rename. The answer from memory holds once: another
            # process may have renamed the directory since.
            if parts in self._written or not parts:
                self._written.discard(parts)
                return True
        return self._is_made(parts) or bool(self._tree(parts))

    def getsize(self, path: Path) -> int:
        file = self._file(path)
        self._files.check(file)
        return file.nbytes

    def isdir(self, path: Path) -> bool:
        parts = self.where.parts(path)
        return not parts or self._is_made(parts) or any(one != parts for one in self._tree(parts))

    def remap_path(self, path: Path) -> str:
        return "/".join((self._url.rstrip("/"), *self.where.parts(path)))

    def _stream(self, path: Path, owners: Owners | None) -> WriteStream:
        parts = self.where.parts(path)
        if not parts:
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        # Files of a save are new. Elsewhere a file may replace another one, of a machine whose clock is ahead.
        staged = names.STAGED in self.where.components(parts)
        token = names.next_token("" if staged else self.trees.newest(self.trees.listing(parts)))
        key = self.where.key(parts, names.object_name(names.FILE, token, self._config.attempt))
        begun = time.monotonic()

        def done(info: ObjectInfo) -> None:
            with self._lock:
                self._views.clear()
                for depth in range(1, len(parts)):
                    self._begun.setdefault(parts[:depth], begun)
                    self._written.add(parts[:depth])

        return WriteStream(self.store, key, self._config.transfer, owners=owners, done=done)

    def _tree(self, parts: Parts) -> Files:
        listing = self.trees.listing(parts)
        found = self.trees.files(listing, parts)
        with self._lock:
            if parts in listing.manifests:
                self._views[parts] = found
            else:
                self._views.pop(parts, None)
        return found

    def _file(self, path: Path) -> File:
        parts = self.where.parts(path)
        with self._lock:
            for depth in range(1, len(parts)):
                kept = self._views.get(parts[:depth], {}).get(parts)
                if kept is not None:
                    return kept
        found = self._tree(parts)
        if parts in found:
            return found[parts]
        if found or not parts or self._is_made(parts):
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        raise self._missing_error(path)

    def _is_made(self, parts: Parts) -> bool:
        with self._lock:
            return parts in self._made

    def _commit(self, manifest: Manifest, target: Parts, path: Path, replaced: ObjectInfo | None) -> None:
        """Put a manifest where there is none, or none but one whose files are all gone.

        Raises:
            OccupiedError: there is another one already.
        """
        key, body = self.where.key(target, names.MANIFEST), manifest.encode()
        able = proven(self.store, self.where.prefix)
        conditions: dict[str, Any] = {"if_none_match": able.conditional_put}
        if replaced is not None:
            conditions = {"if_match": replaced.etag} if able.conditional_put and able.conditional_replace else {}
            old = self.trees.manifest(replaced)
            # The manifest has hidden what is left there, and other files may need it.
            self.store.put(self.where.key(old.source, names.MARKER + old.token), [])
        try:
            view = memoryview(body)
            self.store.put(key, [view], crc32c=crc32c(view), **conditions)
        except PreconditionFailedError:
            # The answer to an earlier attempt of this PUT may have been lost.
            if self.trees.own_manifest(key) != body:
                raise self._occupied(path) from None
        if self._config.on_commit is not None:
            with self._lock:
                begun = self._begun.get(manifest.source, time.monotonic())
            nbytes = sum(file.nbytes for file in manifest.files.values())
            commit_s = time.monotonic() - begun
            tell(self._config.on_commit, CommitInfo(self.remap_path(path), None, nbytes, float("nan"), commit_s))

    def _link(self, file: File, target: Parts, token: str) -> None:
        document = {"key": file.key, "size": file.object_nbytes, "etag": file.etag}
        body = memoryview(json.dumps(document).encode())
        name = names.object_name(names.LINK, token, self._config.attempt)
        self.store.put(self.where.key(target, name), [body], crc32c=crc32c(body))

    def _remove(self, listing: Listing, parts: Parts, found: Files) -> None:
        """Delete what is at or below a path."""
        going = removal.plan(self.trees, listing, parts, found)
        if going.marked:
            token = names.next_token(self.trees.newest(listing))
            self.store.put(self.where.key(parts, names.MARKER + token), [])
        delete_all(self.store, going.manifests)
        delete_all(self.store, going.keys)
        self._forget(parts)

    def _forget(self, parts: Parts) -> None:
        with self._lock:
            self._views.clear()
            self._written = {kept for kept in self._written if kept[: len(parts)] != parts}
            self._begun = {kept: begun for kept, begun in self._begun.items() if kept[: len(parts)] != parts}

    @contextlib.contextmanager
    def _missing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except ObjectNotFoundError as error:
            raise self._missing_error(path) from error
        except PreconditionFailedError as error:
            raise CorruptDataError(
                "The object of a file was replaced after the commit", url=self._url, key=str(path)
            ) from error

    def _missing_error(self, path: Path) -> MissingFileError:
        return MissingFileError("There is no such file or directory", url=self._url, key=str(path))

    def _occupied(self, path: Path) -> OccupiedError:
        return OccupiedError("The destination of a rename is occupied", url=self._url, key=str(path))
