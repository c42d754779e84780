"""`BucketStorage`: the files of torch_checkpointing as objects of a store, each of which is written once.

A save writes its files to a temporary directory, and renames the directory. Here the rename is one conditional PUT of a
manifest, which names the objects that were written before. `sweep` deletes what remains of killed saves and of deleted
or replaced files.
"""

from __future__ import annotations

import errno
import io
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from bucketpoint.dcp.stats import CommitInfo, OnCommit, tell
from bucketpoint.errors import (
    BucketpointError,
    CheckpointExistsError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from bucketpoint.integrations.torch_checkpointing import names, streams
from bucketpoint.integrations.torch_checkpointing.names import File, Files, Names, Parts, Trees, encode
from bucketpoint.integrations.torch_checkpointing.streams import Owners, ReadStream, WriteStream
from bucketpoint.stores import ObjectInfo, as_url, delete_all, open_store, parse_url, proven
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import abort


class OccupiedError(CheckpointExistsError, FileExistsError):
    """A rename found files at its destination, and changed nothing."""

    remedy_default = "Save under another name, or delete the destination with the storage's rmdir first"


class MissingFileError(ObjectNotFoundError, FileNotFoundError):
    """There is no such file below the storage's root."""


@dataclass
class BucketStorageConfig(StorageConfig):
    """Settings of a `BucketStorage`, which can be pickled for the writing process.

    Attributes:
        root: URL below which all paths are resolved: `s3://`, `gs://`, `memory://`, a local path, or another scheme of
            fsspec.
        storage_options: as for `BucketWriter`. They are not part of the `repr`.
        attempt: name of this run, the same on all of its ranks, and unlike those of earlier runs: see `for_this_run`.
            The storage then ignores files in temporary directories that other runs left, as a killed run does. Empty:
            it uses the newest file of each name, from any run.
        transfer: sizes and parallelism of requests.
        temp_dir_prefix: the same as in the `CheckpointWriterConfig`.
        on_commit: function that is called with a `CommitInfo` on the rank that commits, in the process that writes.
            `step` is None and `blocked_s` is nan, because both are unknown here.

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
        """Return settings with a random `attempt` from rank 0. All ranks of the default group call it."""
        drawn = [secrets.token_hex(8)]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(drawn, src=0)
        return cls(root, storage_options, attempt=drawn[0], **more)

    def create_storage(self) -> BucketStorage:
        return BucketStorage(self)


_DELETION = "Delete a checkpoint as a whole, with rmdir; `sweep` removes what killed saves have left"


class BucketStorage(Storage):
    """Files and directories below a URL. Safe to use from several threads.

    A directory exists while there is a file below it.

    Args:
        config: settings of the storage.
    """

    def __init__(self, config: BucketStorageConfig) -> None:
        self._config = config
        self._url = as_url(config.root) or config.root
        self.store, prefix = open_store(self._url, storage_options=config.storage_options)
        self.where = Names(self._url, prefix, config.temp_dir_prefix)
        self.trees = Trees(self.store, self.where, config.attempt)
        self._files = streams.Files(self.store, config.transfer)
        self._lock = threading.Lock()
        # Temporary directory of the last write, start of its first file, and True if `exists` may answer from memory.
        self._saving: Parts = ()
        self._begun = 0.0
        self._fresh = False

    def __repr__(self) -> str:
        return f"BucketStorage({self._url!r})"

    # One worker is enough, because each read receives its ranges in parallel.
    @property
    def mmap_fill_workers(self) -> int | None:
        return 1

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase | io.BytesIO:
        file = self._file(path)
        try:
            if read_args is None or read_args.pre_read_full_file or file.object_nbytes <= streams.WHOLE_BYTES:
                return self._files.whole(file)
            self._files.sums(file)
            return ReadStream(self._files, file)
        except ObjectNotFoundError as error:
            raise self._missing_error(path) from error
        except PreconditionFailedError as error:
            raise CorruptDataError(
                "The object of a file was replaced after the commit", url=self._url, key=str(path)
            ) from error

    def stream_write(self, path: Path) -> io.IOBase:
        return self._stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        return self._stream(path, Owners(data))

    def write(self, path: Path, data: Any) -> None:
        with self._stream(path, None) as stream:
            stream.write(data)

    def delete(self, path: Path) -> None:
        """Delete a file outside of checkpoints and temporary directories.

        The file's object stays until `sweep`: a rename whose reply was lost may have given the object to another name.
        """
        parts = self.where.parts(path)
        entry = self.where.key(parts, names.ENTRY)
        if self.trees.own(entry) is None:
            raise self._refused(path, parts, "cannot be deleted", _DELETION)
        delete_all(self.store, [entry])

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Do nothing: a directory exists while there is a file below it."""

    def rmdir(self, path: Path) -> None:
        """Delete a directory. Its manifest is deleted first, so that a checkpoint disappears as a whole.

        Raises:
            BucketpointError: the directory lies in a checkpoint, or version 0.2 has moved files from there.
        """
        parts = self.where.parts(path)
        infos = self.trees.listing(parts)
        files = self.trees.files(parts, infos)
        if parts in files:
            raise NotADirectoryError(errno.ENOTDIR, "is a file", str(path))
        read = [(*self.where.read(info.key), info.key) for info in infos]
        inside = any(name == names.MANIFEST and at != parts and parts[: len(at)] == at for at, name, _ in read)
        if not parts or not files or inside or any(name.startswith(names.MARKER) for _, name, _ in read):
            raise self._refused(path, parts, "cannot be deleted", _DELETION)
        below = [(name, key) for at, name, key in read if at[: len(parts)] == parts]
        notes = (names.MANIFEST, names.ENTRY)
        delete_all(self.store, [key for name, key in below if name in notes or name.startswith(names.LINK)])
        named = {file for at, own in self.trees.manifests(infos) if at[: len(parts)] == parts for file in own.values()}
        delete_all(self.store, sorted({file.key for file in named.union(files.values())}))
        self.trees.forget()
        with self._lock:
            self._fresh = False

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit a temporary directory to its final name, or rename a file outside of checkpoints in its directory.

        Raises:
            OccupiedError: there is something at the destination, or another process commits to it.
            MissingFileError: there is nothing at the source.
            BucketpointError: the rename is of another kind.
        """
        source, target = self.where.parts(src_path), self.where.parts(dst_path)
        if self.where.components(source) == [*self.where.components(target), names.STAGED]:
            # One listing covers source and destination.
            listed = self.trees.read(self.store.list(self.where.key(target) + "/"))
            files = {path[len(source) :]: file for path, file in listed.items() if path[: len(source)] == source}
            if not files:
                raise self._missing_error(src_path)
            if any(path[: len(target)] == target for path in listed):
                raise self._occupied(dst_path)
            self._commit(source, files, target, dst_path)
            return
        entry = self.where.key(source, names.ENTRY)
        if self.trees.own(entry) is None or self.where.temporary(target) or source[:-1] != target[:-1]:
            raise self._refused(
                src_path,
                source,
                f"cannot be renamed to {dst_path}",
                f"Two renames work: of a temporary directory to its name without {self.where.temp_dir_prefix}, and of "
                "a file outside checkpoints within its directory",
            )
        if any(path != target for path in self.trees.files(target)):
            raise self._occupied(dst_path)
        if source != target:
            self._enter(target, self._file(src_path))
            delete_all(self.store, [entry])

    def ls(self, path: Path) -> list[str]:
        parts = self.where.parts(path)
        if parts:
            files = self.trees.files(parts)
            if parts in files:
                raise NotADirectoryError(errno.ENOTDIR, "is a file", str(path))
            if not files:
                raise self._missing_error(path)
            return sorted({one[len(parts)] for one in files})
        # The root may have many checkpoints. Only paths without a manifest are listed completely.
        key = self.where.key(())
        found: set[str] = set()
        for folder in self.store.list_folders(f"{key}/" if key else ""):
            manifest = f"{folder}{names.MANIFEST}"
            if any(info.key == manifest for info in self.store.list(manifest)):
                found.add(self.where.read(manifest)[0][0])
            else:
                found |= {one[0] for one in self.trees.read(self.store.list(folder))}
        return sorted(found)

    def exists(self, path: Path) -> bool:
        parts = self.where.parts(path)
        with self._lock:
            # A rank calls this between its last write and the rename. Answer from memory only once: another process
            # may have renamed the directory since.
            if self._fresh and parts == self._saving:
                self._fresh = False
                return True
        return not parts or bool(self.trees.files(parts))

    def getsize(self, path: Path) -> int:
        file = self._file(path)
        self._files.check(file)
        return file.nbytes

    def isdir(self, path: Path) -> bool:
        parts = self.where.parts(path)
        return not parts or any(one != parts for one in self.trees.files(parts))

    def remap_path(self, path: Path) -> str:
        return "/".join((self._url.rstrip("/"), *self.where.parts(path)))

    def _stream(self, path: Path, owners: Owners | None) -> WriteStream:
        parts = self.where.parts(path)
        if not parts:
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        saving = self.where.temporary(parts)
        name = names.object_name(names.FILE if saving else names.OTHER_FILE, self._config.attempt)
        begun = time.monotonic()

        def done(info: ObjectInfo) -> None:
            if not saving:
                self._enter(parts, File(info.key, info.size, info.etag))
                return
            with self._lock:
                if saving != self._saving:
                    self._saving, self._begun = saving, begun
                self._fresh = True

        return WriteStream(self.store, self.where.key(parts, name), self._config.transfer, owners=owners, done=done)

    def _file(self, path: Path) -> File:
        parts = self.where.parts(path)
        kept = self.trees.known(parts)
        if kept is not None:
            return kept
        found = self.trees.files(parts) if parts else {}
        if parts in found:
            return found[parts]
        if found or not parts:
            raise IsADirectoryError(errno.EISDIR, "is a directory", str(path))
        raise self._missing_error(path)

    def _enter(self, parts: Parts, file: File) -> None:
        """Record an object as the content of the file at a path, replacing an earlier one."""
        body = memoryview(encode({(): file}))
        self.store.put(self.where.key(parts, names.ENTRY), [body], crc32c=crc32c(body))
        self.trees.forget()

    def _commit(self, source: Parts, files: Files, target: Parts, path: Path) -> None:
        """Write the manifest of a directory. Raises OccupiedError if the directory has another manifest."""
        key, body = self.where.key(target, names.MANIFEST), encode(files)
        able = proven(self.store, self.where.prefix)
        try:
            view = memoryview(body)
            self.store.put(key, [view], crc32c=crc32c(view), if_none_match=able.conditional_put)
        except PreconditionFailedError:
            # The reply to an earlier attempt of this PUT may have been lost.
            if self.trees.own(key) != body:
                raise self._occupied(path) from None
        with self._lock:
            begun = self._begun if source == self._saving else time.monotonic()
            self._saving, self._fresh = (), False
        if self._config.on_commit is not None:
            nbytes = sum(file.nbytes for file in files.values())
            commit_s = time.monotonic() - begun
            tell(self._config.on_commit, CommitInfo(self.remap_path(path), None, nbytes, float("nan"), commit_s))

    def _missing_error(self, path: Path) -> MissingFileError:
        return MissingFileError("There is no such file or directory", url=self._url, key=str(path))

    def _occupied(self, path: Path) -> OccupiedError:
        return OccupiedError("The destination of a rename is occupied", url=self._url, key=str(path))

    def _refused(self, path: Path, parts: Parts, what: str, remedy: str) -> BucketpointError:
        if parts and not self.trees.files(parts):
            return self._missing_error(path)
        return BucketpointError(f"{path} {what}", url=self._url, key=str(path), remedy=remedy)


def sweep(storage: BucketStorage, *, older_than_s: float = 24 * 3600.0, dry_run: bool = False) -> list[str]:
    """Delete objects that no checkpoint and no file needs, and abort incomplete multipart uploads.

    Args:
        storage: the storage whose root is swept.
        older_than_s: age in seconds; younger objects are kept, as they may belong to a save under way. The age
            is computed from the store's date of the object and this machine's clock.
        dry_run: delete nothing.

    Returns:
        the keys of the objects, and of the uploads, that were found.
    """
    oldest = time.time() - older_than_s
    top = f"{storage.where.prefix}/" if storage.where.prefix else ""
    infos = list(storage.store.list(top))
    needed = {file.key for path, file in storage.trees.read(infos).items() if not storage.where.temporary(path)}
    # A file written into a checkpoint may hide a file of the manifest, whose object is still needed.
    needed |= {file.key for _, files in storage.trees.manifests(infos) for file in files.values()}
    garbage = [
        info.key
        for info in infos
        if info.key not in needed
        and info.key.rpartition("/")[2].startswith((names.FILE, names.OTHER_FILE))
        and info.modified is not None
        and info.modified < oldest
    ]
    uploads = [
        upload for upload in storage.store.list_multipart(top) if upload.started is not None and upload.started < oldest
    ]
    if not dry_run:
        delete_all(storage.store, garbage)
        for upload in uploads:
            abort(storage.store, upload.key, upload.upload_id)
    return sorted(garbage) + sorted(upload.key for upload in uploads)
