"""`FsspecStore`: objects on any filesystem that fsspec knows, through fsspec's public, blocking methods.

A library may accept a condition that the service behind it ignores: some S3-compatible services ignore `If-None-Match`,
and a commit that relies on the condition loses checkpoints. So a process makes a trial on a scratch object before its
first commit to each bucket of a filesystem.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fsspec.spec import AbstractFileSystem

from bucketpoint.errors import (
    BucketNotFoundError,
    BucketpointError,
    CorruptDataError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UploadNotFoundError,
)
from bucketpoint.forks import process_lock
from bucketpoint.stores.base import (
    UNDECIDED,
    Buffers,
    Capabilities,
    DeleteFailure,
    ObjectInfo,
    OpenUpload,
    Part,
    check_conditions,
    crc_of,
    scratch_key,
)
from bucketpoint.stores.cutoff import give_up_when_cut
from bucketpoint.stores.fsspec.drivers import (
    Driver,
    WriteReply,
    WrongSumError,
    check,
    driver_of,
    files_below,
    has_folders,
    is_hidden,
    remove,
)
from bucketpoint.stores.fsspec.errors import translate
from bucketpoint.stores.http_body import scatter
from bucketpoint.stores.retry import process_budget

# The name by which a program may have configured the warning: see docs/stores.md.
logger = logging.getLogger("bucketpoint.stores.fsspec.drivers")

_ETAG_NAMES = ("ETag", "etag", "generation", "md5Hash", "content_md5", "checksum")
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")

# Conditions that the service does not check are checked in this process, under this lock: one writer at a time.
_one_writer = process_lock()
_one_trial = process_lock()

_found: weakref.WeakKeyDictionary[AbstractFileSystem, dict[str, tuple[bool, bool, bool]]] = weakref.WeakKeyDictionary()
"""Results of trials by filesystem and by bucket: `Driver.creates`, `replaces` and `checks` as the trial found them. A
filesystem's results are dropped with the filesystem object."""


F = TypeVar("F", bound=Callable[..., Any])


def _given_up(method: F) -> F:
    """Run a method by `give_up_when_cut`, because a request of the filesystem's library cannot be cancelled."""

    @functools.wraps(method)
    def call(self: FsspecStore, *args: Any, **kwargs: Any) -> Any:
        return give_up_when_cut(lambda: method(self, *args, **kwargs), f"{method.__name__.strip('_')} of {self.url}")

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class FsspecStore:
    """A store whose objects are the files below `root` of a filesystem.

    `pipe_file` writes a body whole: other ways of writing can publish half an object when they fail. On filesystems
    with real folders `pipe_file` can, too, so there a file is written under a temporary name and renamed. The service
    checks conditions if it can. Otherwise this store checks them before the write, which is atomic only for the memory
    filesystem, because no other process has access to it.
    """

    fs: AbstractFileSystem
    root: str

    def __post_init__(self) -> None:
        if getattr(self.fs, "asynchronous", False):
            raise BucketpointError(
                "the filesystem was made with asynchronous=True, but bucketpoint calls it from threads",
                remedy="Make the filesystem without asynchronous=True",
            )

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self.root))

    @property
    def identity(self) -> str:
        return self.url

    @property
    def driver(self) -> Driver:
        return driver_of(self.fs)

    @property
    def capabilities(self) -> Capabilities:
        """Features of the filesystem's library; after `proven`, with conditions and checksums as found by the trial."""
        driver, (creates, replaces, checks) = self.driver, self._result or self._untried
        return Capabilities(
            conditional_put=driver.private or creates,
            conditional_replace=driver.private or replaces,
            checksums=checks,
            multipart=bool(driver.limits),
            pinned_reads=driver.private,
            max_put_bytes=driver.max_put_bytes,
            # The memory filesystem keeps a copy of the body anyway, and its calls end at once.
            copies_bodies=not driver.private,
            lists_uploads=driver.lists_uploads,
            shared=driver.shared,
            **driver.limits,
        )

    def prove_conditions(self, prefix: str) -> Capabilities:
        """Return the capabilities. The first call of a process for a bucket makes the trial.

        The trial sends about ten small requests for two scratch objects below `prefix`, and deletes the objects. Logs a
        warning, once, if commits to this store will have no conditional writes. Raises as `proven`.
        """
        with _one_trial:
            if self._result is not None:
                return self.capabilities
            why: builtins.list[str] = []
            result = self._tried(prefix, why) if self.driver.creates else (False, False, False)
            # Filesystems with the same settings are equal. The entry moves to this one, because it is dropped with its
            # key object.
            _found[self.fs] = {**_found.pop(self.fs, {}), self._bucket: result}
        if not (result[0] or self.driver.private):
            logger.warning(
                "%s has no conditional writes%s: a commit reads .metadata before and after the write. This is "
                "safe against crashes, but not against two jobs that save to the same URL at the same time",
                self.url,
                f" ({'; '.join(why)})" if why else "",
            )
        return self.capabilities

    def _tried(self, prefix: str, why: builtins.list[str]) -> tuple[bool, bool, bool]:
        """Make the trial. Returns an entry of `_found`, and adds the reasons for failed trials to `why`."""
        key = scratch_key(prefix)
        try:
            creates = _is_refused(lambda: self._create_twice(key), "an exclusive create", why)
            replaces = (
                creates and self.driver.replaces and _is_refused(lambda: self._replace_twice(key), "a replacement", why)
            )
            return creates, replaces, self.driver.checks and self._checks(f"{key}-sum")
        finally:
            with contextlib.suppress(StoreError):
                # Without the permission to delete, one or two tiny objects remain, like all that such a job saves.
                self.delete([key, f"{key}-sum"])

    def _create_twice(self, key: str) -> None:
        """Create an object twice. Raises PreconditionFailedError if exclusive creates work."""
        try:
            self._put_unseen(key, b"first")
        except PreconditionFailedError as error:
            raise StoreError(f"it was refused although there was no object: {error.message}", url=self.url) from None
        try:
            self._put_unseen(key, b"second")
        except PreconditionFailedError:
            if self.get(key)[0] != b"first":
                raise StoreError("it was refused, but the object was replaced", url=self.url) from None
            raise

    def _replace_twice(self, key: str) -> None:
        """Replace an object twice, expecting the same ETag. Raises PreconditionFailedError if the condition works."""
        before = self.head(key).etag or ""
        try:
            self._put_unseen(key, b"third", before)
        except PreconditionFailedError as error:
            raise StoreError(f"it was refused although the ETag was right: {error.message}", url=self.url) from None
        self._put_unseen(key, b"fourth", before)

    def _checks(self, key: str) -> bool:
        try:
            self.put(key, [memoryview(b"checksum")], crc32c=1)
        except UNDECIDED:
            raise
        except StoreError:
            return True
        return False

    @property
    def _bucket(self) -> str:
        return self.root.lstrip("/").partition("/")[0]

    @property
    def _result(self) -> tuple[bool, bool, bool] | None:
        return _found.get(self.fs, {}).get(self._bucket)

    @property
    def _untried(self) -> tuple[bool, bool, bool]:
        """Conditional writes and checksums that the library is assumed to support before `prove_conditions`."""
        return self.driver.creates, self.driver.replaces, self.driver.checks

    @_given_up
    def put(
        self,
        key: str,
        body: Buffers,
        *,
        crc32c: int | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> ObjectInfo:
        data = b"".join(body)
        probed = self._result
        creates, replaces, _ = probed or self._untried
        native = replaces if if_match is not None else if_none_match and creates
        conditional = if_none_match or if_match is not None
        # Before a trial the service's condition is not reliable, so this store checks the condition, too.
        looks = conditional and (probed is None or not native)
        # A service may answer "not found", and not "precondition failed", if the object to replace is missing.
        missing = self._above if if_match is None else PreconditionFailedError
        with (
            self._errors("put", key, missing=missing, conditional=conditional),
            _one_writer if looks else contextlib.nullcontext(),
        ):
            if looks:
                check_conditions(self._find(key), self._url(key), if_none_match=if_none_match, if_match=if_match)
            target = self.fs, self._path(key), data
            reply = self.driver.write_if(*target, if_match) if native else self.driver.write(*target)
            return self._written(key, len(data), reply, crc32c, looked=looks)

    @_given_up
    def _put_unseen(self, key: str, data: bytes, etag: str | None = None) -> None:
        """Create an object, or replace the one with this ETag, by the service's condition alone, for the trial."""
        with self._errors("put", key, missing=self._above if etag is None else ObjectNotFoundError, conditional=True):
            reply = self.driver.write_if(self.fs, self._path(key), data, etag)
            self._written(key, len(data), reply)

    @_given_up
    def get(self, key: str, *, max_bytes: int | None = None, first: int | None = None) -> tuple[bytes, ObjectInfo]:
        info = self.head(key)
        part = first is not None and info.size > first
        if max_bytes is not None and not part and info.size > max_bytes:
            raise CorruptDataError(
                f"the object has {info.size} bytes, and at most {max_bytes} were expected", url=self._url(key)
            )
        if not info.size:
            return b"", info
        with self._errors("get", key):
            # Both ends are given: otherwise some filesystems first ask for the size, or cut the read into pieces.
            return bytes(self.fs.cat_file(self._path(key), start=0, end=first if part else info.size)), info

    def read_into(self, key: str, offset: int, buffers: Buffers, *, if_match: str | None = None) -> None:
        size = sum(view.nbytes for view in buffers)
        if not size:
            return
        self._check_etag(key, if_match)
        with self._errors("get", key):
            try:
                # Only `_cat` may be abandoned: this method writes into the caller's memory.
                data = memoryview(self._cat(key, offset, offset + size))
            except EndpointError:
                raise
            except Exception:
                # Some services answer "bad request" to a range beyond the end, but also to many other faults.
                info = self._find(key)
                if info is not None and info.size < offset + size:
                    raise CorruptDataError("the object is too short for the range", url=self._url(key)) from None
                raise
        if data.nbytes != size:
            raise CorruptDataError("the object is too short for the range", url=self._url(key))
        # Checked before and after the read: bytes read between two equal ETags belong to that ETag.
        self._check_etag(key, if_match)
        scatter(data, buffers)

    @_given_up
    def _cat(self, key: str, start: int, end: int) -> Any:
        return self.fs.cat_file(self._path(key), start=start, end=end)

    @_given_up
    def head(self, key: str) -> ObjectInfo:
        with self._errors("head", key):
            info = self._find(key)
        if info is None:
            raise ObjectNotFoundError("no such object", url=self._url(key))
        return info

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rfind("/") + 1]
        with self._errors("list", prefix):
            files = self._files(folder)
        above = len(self._path(""))
        for name, info in sorted(files.items()):
            key = name[above:]
            if key.startswith(prefix) and not is_hidden(key):
                yield _info(key, info)

    @_given_up
    def _files(self, folder: str) -> dict[str, Any]:
        self.fs.invalidate_cache()
        return files_below(self.fs, self._path(folder))

    def list_folders(self, prefix: str) -> Iterator[str]:
        # Not by `ls`, which also lists empty folders on filesystems with real folders.
        seen = ""
        for info in self.list(prefix):
            head, slash, _ = info.key[len(prefix) :].partition("/")
            folder = prefix + head + slash
            if slash and folder != seen:
                seen = folder
                yield folder

    @_given_up
    def delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        failures = []
        with self._errors("delete", keys[0] if keys else ""):
            removed = remove(self.fs, [self._path(key) for key in keys])
        for key, problem in zip(keys, removed, strict=True):
            failure = None if problem is None else self._translated(problem, "delete", key)
            if failure is not None and not isinstance(failure, ObjectNotFoundError):
                failures.append(DeleteFailure(key, type(failure).__name__, failure.message, failure.remedy))
        return failures

    @_given_up
    def delete_if(self, key: str, etag: str) -> None:
        with self._errors("delete", key), _one_writer:
            info = self._find(key)
            if info is None:
                return
            check_conditions(info, self._url(key), if_match=etag)
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self._path(key))

    @_given_up
    def copy(self, source: ObjectInfo, target: str) -> ObjectInfo:
        # No filesystem has a condition for copies: `transfer.copy` looks at the source after the copy, too.
        check_conditions(self.head(source.key), self._url(source.key), if_match=source.etag)
        with self._errors("copy", source.key):
            self.driver.copy(self.fs, self._path(source.key), self._path(target))
        return self.head(target)

    @_given_up
    def create_multipart(self, key: str) -> str:
        with self._errors("create_multipart", key, missing=self._above):
            return self.driver.begin(self.fs, self._path(key))

    @_given_up
    def put_part(self, key: str, upload_id: str, number: int, body: Buffers, *, crc32c: int | None = None) -> Part:
        data = b"".join(body)
        if self.driver.checks:
            # An upload that was begun with checksums accepts only parts with a checksum.
            crc32c = crc_of(body, crc32c)
        with self._errors("put_part", key, missing=UploadNotFoundError):
            etag = self.driver.send(self.fs, self._path(key), upload_id, number, data, crc32c)
        return Part(number, len(data), etag, crc32c)

    @_given_up
    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part]) -> ObjectInfo:
        ordered = sorted(parts, key=lambda part: part.number)
        with self._errors("complete_multipart", key, missing=UploadNotFoundError):
            reply = self.driver.complete(self.fs, self._path(key), upload_id, ordered)
            return self._written(key, sum(part.size for part in ordered), reply)

    @_given_up
    def abort_multipart(self, key: str, upload_id: str) -> None:
        with self._errors("abort_multipart", key), contextlib.suppress(FileNotFoundError):
            self.driver.abort(self.fs, self._path(key), upload_id)

    def list_multipart(self, prefix: str) -> Iterator[OpenUpload]:
        above = len(self._path(""))
        with self._errors("list_multipart", prefix):
            for path, upload_id, info in self.driver.uploads(self.fs, self._path(prefix)):
                yield OpenUpload(path[above:], upload_id, _seconds(info))

    @property
    def _above(self) -> type[StoreError]:
        """Error class for a write that fails with "not found": without real folders only the bucket can be missing."""
        return ObjectNotFoundError if has_folders(self.fs) else BucketNotFoundError

    def _written(
        self, key: str, size: int, reply: WriteReply, crc32c: int | None = None, *, looked: bool = False
    ) -> ObjectInfo:
        """Describe a written object. Deletes it if the service has another CRC32C of it."""
        info = reply if _etag(reply) else self._describe(key)
        if info is None or int(info.get("size", size) or 0) != size:
            if looked:
                # The condition was checked before the write, and not by the service: another writer came between.
                raise PreconditionFailedError("the object was deleted or replaced meanwhile", url=self._url(key))
            # Some libraries accept any answer with status 200, such as a login page.
            raise StoreError(
                "the store does not have what was written: probably another server answered", url=self._url(key)
            )
        try:
            check(info, crc32c)
        except WrongSumError:
            with contextlib.suppress(Exception):
                self.fs.rm_file(self._path(key))
            raise
        return ObjectInfo(key, size, _etag(info), _seconds(info))

    def _find(self, key: str) -> ObjectInfo | None:
        info = self._describe(key)
        return None if info is None else _info(key, info)

    @_given_up
    def _describe(self, key: str) -> WriteReply | None:
        self.fs.invalidate_cache(self._path(key))
        try:
            info: WriteReply = self.fs.info(self._path(key))
        except (FileNotFoundError, NotADirectoryError) as error:
            # Libraries raise these errors for other answers, too, such as a missing encryption key.
            if isinstance(self._translated(error, "head", key), ObjectNotFoundError):
                return None
            raise
        return info if info.get("type") == "file" else None

    def _check_etag(self, key: str, if_match: str | None) -> None:
        if if_match is not None:
            check_conditions(self.head(key), self._url(key), if_match=if_match)

    def _path(self, key: str) -> str:
        return f"{self.root.rstrip('/')}/{key}"

    def _url(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"

    def _translated(self, error: BaseException, operation: str, key: str, *, conditional: bool = False) -> StoreError:
        return translate(error, operation, self._url(key), _options(self.fs), conditional=conditional)

    @contextmanager
    def _errors(
        self,
        operation: str,
        key: str,
        *,
        missing: type[StoreError] = ObjectNotFoundError,
        conditional: bool = False,
    ) -> Iterator[None]:
        failure: StoreError
        process_budget().add({operation: 1})
        try:
            yield
            return
        except BucketpointError:
            raise
        except WrongSumError as error:
            failure = CorruptDataError(f"{operation} failed: {error}", url=self._url(key))
        except Exception as error:  # noqa: BLE001 (each library has its own exceptions; all are translated)
            failure = self._translated(error, operation, key, conditional=conditional)
            if isinstance(failure, ObjectNotFoundError):
                failure = missing(failure.message, url=failure.url)
        try:
            raise failure
        finally:
            # The library's exception may quote secrets from its options, so it must not stay reachable from this error.
            failure.__context__ = None


def _is_refused(attempt: Callable[[], None], what: str, why: list[str]) -> bool:
    try:
        attempt()
    except PreconditionFailedError:
        return True
    except UNDECIDED:
        raise
    except StoreError as error:
        why.append(f"{what} failed: {error.message}")
        return False
    why.append(f"the service ignores the condition of {what}")
    return False


def _options(fs: AbstractFileSystem) -> dict[str, Any]:
    """Return the options of a filesystem, with those of the filesystems that it wraps."""
    below = _options(fs.fs) if isinstance(getattr(fs, "fs", None), AbstractFileSystem) else {}
    return {"below": below, **getattr(fs, "storage_options", {})}


def _info(key: str, info: WriteReply) -> ObjectInfo:
    return ObjectInfo(key, int(info.get("size") or 0), _etag(info), _seconds(info))


def _etag(info: WriteReply) -> str | None:
    for name in _ETAG_NAMES:
        if info.get(name):
            return str(info[name]).strip('"')
    seconds = _seconds(info)
    return None if seconds is None else f"{seconds:.6f}-{info.get('size')}-{info.get('ino', '')}"


def _seconds(info: WriteReply) -> float | None:
    for name in _TIME_NAMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
    return None
