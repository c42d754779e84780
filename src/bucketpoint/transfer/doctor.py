"""Is a place fit for checkpoints? Tries below a scratch prefix what saves, loads and pruning will do, and cleans up.

Each check ends in a finding; none of them raises for what the store refuses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bucketpoint.errors import (
    BucketNotFoundError,
    CorruptDataError,
    CredentialsError,
    EndpointError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    WrongRegionError,
)
from bucketpoint.stores import FsspecStore, LocalStore, S3Store, Store
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.doctor_bucket import Finding, bucket_findings, clock_finding
from bucketpoint.transfer.doctor_fsspec import fsspec_findings
from bucketpoint.transfer.doctor_remedies import needed, without_conditions
from bucketpoint.transfer.doctor_s3 import service_finding
from bucketpoint.transfer.speed import Speed, probe
from bucketpoint.transfer.tasks import TaskGroup

T = TypeVar("T")

DEFAULT_PROBE_BYTES = 128 << 20
RACERS = 8

_UNREACHABLE = (EndpointError, CredentialsError, BucketNotFoundError, WrongRegionError)


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order of the checks, and what the probe measured, if it came that far."""

    findings: Sequence[Finding]
    speed: Speed | None

    @property
    def ok(self) -> bool:
        return all(finding.status != "fail" for finding in self.findings)


def examine(
    store: Store,
    prefix: str,
    *,
    probe_bytes: int = DEFAULT_PROBE_BYTES,
    told: Callable[[Finding], None] = lambda finding: None,
) -> Diagnosis:
    """Try everything below `prefix`, in a folder with a name that nobody else has, and delete it again.

    Args:
        probe_bytes: about how much to move up, and down again, to measure throughput; 0 for no measuring.
        told: called with each finding as it is made.
    """
    run = _Examination(store, prefix, told)
    try:
        run.all(probe_bytes)
    finally:
        run.clean_up()
    return Diagnosis(run.findings, run.speed)


class _Examination:
    """One run. `findings` grows; keys that were written are remembered, so that they can be deleted."""

    def __init__(self, store: Store, prefix: str, told: Callable[[Finding], None]) -> None:
        self._store = store
        self._prefix = prefix
        self._told = told
        self._folder = f"{prefix}/" if prefix else ""
        self._folder += f"bucketpoint-doctor-{os.urandom(6).hex()}/"
        self._keys: dict[str, None] = {}
        self._uploads: list[tuple[str, str]] = []
        self.findings: list[Finding] = []
        self.speed: Speed | None = None

    def all(self, probe_bytes: int) -> None:
        written = self._access()
        if self.findings[0].check == "connect":
            return
        if isinstance(self._store, S3Store):
            self._add(clock_finding(self._store))
        if written:
            if isinstance(self._store, FsspecStore):
                # First: what they find is what the store then says of itself.
                for finding in fsspec_findings(self._store, self._folder.rstrip("/")):
                    self._add(finding)
            self._create_only()
            self._if_match()
            self._pinned_reads()
            self._checksums()
            self._multipart()
            if isinstance(self._store, S3Store):
                self._add(service_finding(self._store, self._key, self._begin))
        for finding in bucket_findings(self._store, self._prefix):
            self._add(finding)
        if isinstance(self._store, LocalStore) and written:
            free = shutil.disk_usage(self._store.root).free
            self._say("space", "ok", f"{free / 1e9:.1f} GB are free on this filesystem")
        if probe_bytes and written:
            self._throughput(probe_bytes)

    # -- rights -------------------------------------------------------------------------------------------------------

    def _access(self) -> bool:
        """Put, get, list and delete, each by its name. False where nothing can be written."""
        key, body = self._key("access"), b"bucketpoint doctor"
        try:
            self._store.put(key, [memoryview(body)])
        except StoreError as error:
            # Nothing was written, so there is nothing to clean up.
            self._keys.clear()
            if isinstance(error, _UNREACHABLE):
                self._failed("connect", error)
            else:
                self._failed("put", error, needed(self._store, "put"))
            return False
        self._say("put", "ok", "objects can be written")

        def read() -> None:
            self._expect(self._store.get(key)[0] == body, "other bytes came back")

        self._try("get", read, "objects can be read", remedy=needed(self._store, "get"))
        listing = needed(self._store, "list")
        self._try("list", lambda: self._lists(key), "objects can be listed", remedy=listing, warn=True)
        self._try("delete", self._deletes, "objects can be deleted", remedy=needed(self._store, "delete"), warn=True)
        return True

    def _lists(self, key: str) -> None:
        self._expect(any(info.key == key for info in self._store.list(self._folder)), "the object is not listed")

    def _deletes(self) -> None:
        key = self._key("deleted")
        self._store.put(key, [memoryview(b"x")])
        failures = self._store.delete([key])
        self._expect(not failures, f"{failures[0].code}: {failures[0].message}" if failures else "")
        try:
            self._store.head(key)
        except ObjectNotFoundError:
            del self._keys[key]
            return
        raise StoreError("the object is still there", url=self._store.url)

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _create_only(self) -> None:
        check = "create-only put"
        if not self._store.capabilities.conditional_put:
            self._say(check, "warn", "this store has no conditional writes", without_conditions(self._store))
            return
        key = self._key("create-only")

        def put(content: bytes, key: str = key) -> bool:
            try:
                self._store.put(key, [memoryview(content)], if_none_match=True)
            except PreconditionFailedError:
                return False
            return True

        def trial() -> None:
            self._expect(put(b"first"), "the store refused it where nothing was")
            for content in (b"second", b"third"):
                self._expect(not put(content), "the store ignores If-None-Match and overwrote an object")
            self._expect(
                self._store.get(key)[0] == b"first", "the store refused it and overwrote the object all the same"
            )
            race = self._key("race")
            won: list[bool] = []
            with TaskGroup(RACERS, name="bucketpoint-doctor") as group:
                for racer in range(RACERS):
                    group.start(lambda racer=racer: won.append(put(b"%d" % racer, race)))  # type: ignore[misc]
            self._expect(sum(won) == 1, f"{sum(won)} of {RACERS} writers at once were told that they had created it")

        said = f"refused twice, and won by one of {RACERS} at once"
        self._try(check, trial, said, remedy=without_conditions(self._store))

    def _if_match(self) -> None:
        able = self._store.capabilities
        if not (able.conditional_put and able.conditional_replace):
            return
        key = self._key("if-match")

        def trial() -> None:
            first = self._store.put(key, [memoryview(b"first")])
            self._store.put(key, [memoryview(b"second")], if_match=first.etag)
            try:
                self._store.put(key, [memoryview(b"third")], if_match=first.etag)
            except PreconditionFailedError:
                return
            raise StoreError("the store ignores If-Match and overwrote an object that had changed")

        said = "honoured where the object is the expected one, refused where it is not"
        self._try("put if match", trial, said, remedy=without_conditions(self._store))

    def _pinned_reads(self) -> None:
        if not self._store.capabilities.pinned_reads:
            self._say("pinned read", "skip", "this store has no conditional reads: checksums alone protect a load")
            return
        key = self._key("pinned")

        def trial() -> None:
            info = self._store.put(key, [memoryview(b"x")])
            view = memoryview(bytearray(1))
            self._store.read_into(key, 0, [view], if_match=info.etag)
            try:
                self._store.read_into(key, 0, [view], if_match="0" * 32)
            except PreconditionFailedError:
                return
            raise StoreError("the store ignores If-Match on reads")

        remedy = "A replaced object is then noticed by its checksum alone"
        self._try("pinned read", trial, "a replaced object is refused", remedy=remedy, warn=True)

    def _checksums(self) -> None:
        if not self._store.capabilities.checksums:
            self._say("checksum", "skip", "no checksums are sent to this store: a load compares what it reads")
            return
        body, key = memoryview(b"checksum"), self._key("checksum")

        def trial() -> None:
            self._store.put(key, [body], crc32c=crc32c(body))
            try:
                self._store.put(key, [body], crc32c=crc32c(body) ^ 1)
            except CorruptDataError:
                return
            raise StoreError("the store took a body with a wrong CRC32C")

        remedy = "Bytes that are garbled on their way up are noticed at load only; checksums=false spares sending them"
        self._try("checksum", trial, "a body with a wrong CRC32C is refused", remedy=remedy, warn=True)

    # -- multipart ----------------------------------------------------------------------------------------------------

    def _multipart(self) -> None:
        store = self._store
        if not store.capabilities.multipart:
            self._say("multipart", "skip", "this store takes whole objects only")
            return
        key = self._key("multipart")
        upload = self._try("multipart create", lambda: self._begin(key), "an upload was begun")
        if upload is None:
            return
        size = store.capabilities.min_part_bytes
        bodies = [memoryview(bytes(size)), memoryview(b"end")]

        def send() -> list[object]:
            return [store.put_part(key, upload, number, [body]) for number, body in enumerate(bodies, 1)]

        parts = self._try("multipart upload", send, "two parts were sent")
        if parts is not None:

            def finish() -> None:
                store.complete_multipart(key, upload, parts)  # type: ignore[arg-type]
                self._uploads.remove((key, upload))
                self._expect(store.head(key).size == size + 3, "the object has another size than its parts")

            self._try("multipart complete", finish, "the object is the sum of its parts")
        dropped = self._key("aborted")
        other = self._try_quietly(lambda: self._begin(dropped))
        if other is None:
            return
        remedy = "What a killed save leaves cannot be swept by name then; a lifecycle rule has to do it"
        self._try(
            "multipart list",
            lambda: self._expect(other in self._open(dropped), "an upload under way is not listed"),
            "uploads under way are listed",
            remedy=remedy,
            warn=True,
        )

        def drop() -> None:
            store.abort_multipart(dropped, other)
            self._uploads.remove((dropped, other))
            self._expect(other not in self._try_open(dropped), "the upload is still there")

        self._try("multipart abort", drop, "an upload was aborted")

    def _begin(self, key: str) -> str:
        upload = self._store.create_multipart(key)
        self._uploads.append((key, upload))
        return upload

    def _open(self, key: str) -> list[str]:
        return [upload.upload_id for upload in self._store.list_multipart(key)]

    def _try_open(self, key: str) -> list[str]:
        return self._try_quietly(lambda: self._open(key)) or []

    # -- throughput ---------------------------------------------------------------------------------------------------

    def _throughput(self, nbytes: int) -> None:
        def measure() -> Speed:
            return probe(self._store, self._folder, nbytes, used=lambda key: self._keys.update({key: None}))

        speed = self._try_quietly(measure, "throughput")
        if speed is None:
            return
        self.speed = speed
        for direction in ("up", "down"):
            levels = [(level.connections, level.up if direction == "up" else level.down) for level in speed.levels]
            said = ", ".join(f"{rate / 1e6:,.0f} MB/s with {count}" for count, rate in levels)
            self._say(f"throughput {direction}", "ok", f"{said} connections")
        advised = speed.advice(self._store.capabilities.min_part_bytes)
        part, rate, latency = advised.part_bytes >> 20, speed.connection_rate, speed.latency_s * 1e3
        waiting = speed.latency_s / (speed.latency_s + advised.part_bytes / rate)
        self._say(
            "advice",
            "ok",
            f"TransferOptions(part_bytes={part} << 20, connections={advised.connections}): an answer takes "
            f"{latency:.1f} ms and a connection carries {rate / 1e6:,.0f} MB/s, so that a part of {part} MiB "
            f"waits for {waiting:.0%} of its time; {advised.connections} are the fewest connections that carry 90 % of "
            "what the most of those tried did",
        )

    # -- cleaning up --------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Delete whatever was written. What stays is named."""
        for key, upload in list(self._uploads):
            if self._try_quietly(lambda key=key, upload=upload: self._drop(key, upload)) is None:  # type: ignore[misc]
                self._say("clean-up", "warn", f"the multipart upload of {key} stays", "Abort it by hand")
        if not self._keys:
            return
        failures = self._try_quietly(lambda: [failure.key for failure in self._store.delete(list(self._keys))])
        left = list(self._keys) if failures is None else failures
        if left:
            remedy = f"Delete everything below {self._store.url}/{self._folder}"
            self._say("clean-up", "warn", f"{len(left)} objects of this examination stay", remedy)
        else:
            self._say("clean-up", "ok", "everything that was written is deleted")

    def _drop(self, key: str, upload: str) -> bool:
        self._store.abort_multipart(key, upload)
        return True

    # -- findings -----------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        key = self._folder + name
        self._keys[key] = None
        return key

    def _try(
        self,
        check: str,
        action: Callable[[], T],
        said: str,
        *,
        remedy: str | None = None,
        warn: bool = False,
    ) -> T | None:
        try:
            result = action()
        except StoreError as error:
            self._failed(check, error, remedy, warn=warn)
            return None
        self._say(check, "ok", said)
        return result

    def _try_quietly(self, action: Callable[[], T], check: str | None = None) -> T | None:
        try:
            return action()
        except StoreError as error:
            if check is not None:
                self._failed(check, error)
            return None

    def _expect(self, true: bool, otherwise: str) -> None:
        if not true:
            raise StoreError(otherwise, url=self._store.url)

    def _failed(self, check: str, error: StoreError, remedy: str | None = None, *, warn: bool = False) -> None:
        self._say(check, "warn" if warn else "fail", error.message, remedy or error.remedy)

    def _say(self, check: str, status: str, message: str, remedy: str | None = None) -> None:
        self._add(Finding(check, status, message, remedy))

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._told(finding)
