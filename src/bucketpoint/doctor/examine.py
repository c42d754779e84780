"""Examination of a store's fitness for checkpoints: tries the requests of saves, loads and prunes, and cleans up.

Each check ends in a finding; a refusal by the store is never raised. Scratch objects lie below `_bucketpoint/doctor/`,
where a trainer may delete objects that it could not delete elsewhere.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bucketpoint.doctor.bucket import Finding, bucket_findings, clock_finding
from bucketpoint.doctor.fsspec import fsspec_findings
from bucketpoint.doctor.reader import examine_pinned_read, examine_reader
from bucketpoint.doctor.remedies import needed, removal, without_conditions
from bucketpoint.doctor.report import UNREACHABLE, Report
from bucketpoint.doctor.s3 import service_finding
from bucketpoint.doctor.scratch import ScratchKeys
from bucketpoint.doctor.speed import measure
from bucketpoint.doctor.throughput import Speed
from bucketpoint.errors import CorruptDataError, ObjectNotFoundError, PreconditionFailedError, StoreError, first_of
from bucketpoint.stores import FsspecStore, LocalStore, S3Store, Store
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.tasks import TaskGroup

DEFAULT_PROBE_BYTES = 128 << 20
RACERS = 8

ADMIN, TRAINER, READER, PRUNER = "admin", "trainer", "reader", "pruner"
ROLES = (ADMIN, TRAINER, READER, PRUNER)
"""The roles of `policies/`, and ADMIN, which saves, loads and prunes."""

_NAMED = 5
_STAYS = "it could not be deleted again"


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        findings: all findings, in the order of the checks.
        speed: the measured throughput; None if it was not measured.
        left: keys of objects, and of uploads under way, that were written and could not be removed.
    """

    findings: Sequence[Finding]
    speed: Speed | None
    left: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return all(finding.status != "fail" for finding in self.findings)


def examine(
    store: Store,
    prefix: str,
    *,
    role: str = ADMIN,
    probe_bytes: int = DEFAULT_PROBE_BYTES,
    told: Callable[[Finding], None] = lambda finding: None,
) -> Diagnosis:
    """Try out the requests of `role` below `prefix`, in a folder with a random name, and delete that folder.

    The permission to delete is checked before any object is written. Without it, one object of a few bytes is written
    and stays, under the same key each time, and checks that need another object are skipped.

    Args:
        role: one of `ROLES`. A reader writes nothing; a pruner writes notes and deletes; only a role that saves is
            measured.
        probe_bytes: about how many bytes to upload, and to download again, to measure throughput; 0 to skip this.
        told: called with each finding as it is made.
    """
    run = _Examination(Report(store, told), prefix, role)
    try:
        run.all(probe_bytes)
    finally:
        run.clean_up()
    return Diagnosis(run.report.findings, run.speed, run.left)


class _Examination:
    """One run of an examination. It remembers the keys that it wrote, so that they can be deleted."""

    def __init__(self, report: Report, prefix: str, role: str) -> None:
        if role not in ROLES:
            raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")
        self.report = report
        self._store = report.store
        self._prefix = prefix
        self._role = role
        self._at = ScratchKeys.below(prefix)
        self._removable = True
        self._wrote_data = False
        self._keys: dict[str, None] = {}
        self._uploads: list[tuple[str, str]] = []
        self.left: list[str] = []
        self.speed: Speed | None = None

    def all(self, probe_bytes: int) -> None:
        try:
            if self._role == READER:
                examine_reader(self.report, self._prefix)
            written = self._role != READER and self._access()
        except UNREACHABLE as error:
            self.report.failed("connect", error)
            return
        if isinstance(self._store, S3Store):
            self.report.add(clock_finding(self._store))
        if self._role == READER:
            return
        if written:
            self._requests()
        for finding in bucket_findings(self._store, self._prefix):
            self.report.add(finding)
        if isinstance(self._store, LocalStore) and written:
            free = shutil.disk_usage(self._store.root).free
            self.report.say("space", "ok", f"{free / 1e9:.1f} GB are free on this filesystem")
        if probe_bytes and written and self._role != PRUNER:
            if self._removable:
                self.speed = measure(self.report, self._at.folder, probe_bytes, used=self._remember)
            else:
                self.report.say("throughput", "skip", f"not measured: what that writes, {_STAYS}")

    def _requests(self) -> None:
        if isinstance(self._store, FsspecStore) and self._removable:
            # First, because the trial of the conditions decides the store's capabilities for the checks below.
            for finding in fsspec_findings(self._store, self._at.folder.rstrip("/")):
                self.report.add(finding)
        elif isinstance(self._store, FsspecStore):
            self.report.say("filesystem", "skip", f"conditions were not tried out: what that writes, {_STAYS}")
        self._create_only()
        self._beside(self._if_match())
        self._pinned_reads()
        self._checksums()
        self._multipart()
        if isinstance(self._store, S3Store):
            self.report.add(service_finding(self._store, self._key, self._begin))

    # -- rights -------------------------------------------------------------------------------------------------------

    def _access(self) -> bool:
        """Check the permissions to put, get, list and delete. Returns False if nothing can be written.

        Raises:
            EndpointError, CredentialsError, BucketNotFoundError, WrongRegionError: the store cannot be reached.
        """
        report, store = self.report, self._store
        prunes = self._role in (ADMIN, PRUNER)
        data_stays, notes_stay = self._why_kept(self._at.data), self._why_kept(self._at.folder + "access")
        self._removable = notes_stay is None
        beside = data_stays is None and self._role != PRUNER
        self._wrote_data = beside
        key, body = self._at.data if beside else self._key("access"), b"bucketpoint doctor"
        self._remember(key)
        lasting = key == self._at.lasting
        try:
            with contextlib.suppress(PreconditionFailedError):
                # The object of an earlier examination will do: some stores do not let a role without the permission to
                # delete replace an object.
                store.put(key, [memoryview(body)], if_none_match=lasting and store.capabilities.conditional_put)
        except StoreError as error:
            # Nothing was written, so there is nothing to clean up.
            self._keys.clear()
            if isinstance(error, UNREACHABLE):
                raise
            report.failed("put", error, needed(store, "put notes" if self._role == PRUNER else "put"))
            return False
        report.say("put", "ok", "objects can be written" if beside else "notes can be written")

        def read() -> None:
            report.expect(store.get(key)[0] == body or lasting, "the bytes read differ from the bytes written")

        def listed() -> None:
            found = store.list(key.rpartition("/")[0] + "/")
            report.expect(any(info.key == key for info in found), "a listing lacks the new object")

        pruner = self._role == PRUNER
        report.attempt("get", read, "objects can be read", remedy=needed(store, "get"))
        report.attempt("list", listed, "objects can be listed", remedy=needed(store, "list"), warn=not pruner)
        if prunes:
            self._deletes("delete", "objects", data_stays, key if beside else None)
        self._removable = self._deletes("delete notes", "notes", notes_stay, self._at.folder + "deleted")
        return True

    def _why_kept(self, key: str) -> str | None:
        """Return the reason why this key could not be deleted, or None. No object has the key, so nothing is lost."""
        try:
            failures = self._store.delete([key])
        except UNREACHABLE:
            raise
        except StoreError as error:
            return error.message
        return f"{failures[0].code}: {failures[0].message}" if failures else None

    def _deletes(self, check: str, what: str, refused: str | None, key: str | None) -> bool:
        """Check the permission to delete.

        Args:
            refused: the reason why the deletion of a missing object was refused, or None.
            key: key at which an object is written and deleted; None to skip that.
        """
        store, report = self._store, self.report

        def trial() -> bool:
            report.expect(refused is None, refused or "")
            if key is None:
                return True
            self._remember(key)
            store.put(key, [memoryview(b"x")])
            failures = store.delete([key])
            report.expect(not failures, f"{failures[0].code}: {failures[0].message}" if failures else "")
            try:
                store.head(key)
            except ObjectNotFoundError:
                del self._keys[key]
                return True
            raise StoreError("the object still exists after its deletion", url=store.url)

        said, warn = f"{what} can be deleted", self._role != PRUNER
        return report.attempt(check, trial, said, remedy=needed(store, check), warn=warn) is not None

    def _beside(self, etag: str | None) -> None:
        """Check the permission to write a key that could not be deleted, by a condition that fails: nothing is written.

        Args:
            etag: ETag of another object; None if the store does not honour conditions.
        """
        check, key = "put data", self._at.data
        if self._role == PRUNER:
            check, key = "put .metadata", self._at.metadata
        elif self._wrote_data:
            return
        if etag is None:
            self.report.say(check, "skip", f"not tried: {_STAYS}, and this store has no condition that prevents it")
            return

        def trial() -> bool:
            try:
                self._store.put(key, [memoryview(b"x")], if_match=etag)
            except PreconditionFailedError:
                return True
            self._remember(key)
            raise StoreError("the store ignores If-Match where no object is")

        said = "a write is refused for its condition alone"
        self.report.attempt(check, trial, said, remedy=needed(self._store, check), warn=self._role == PRUNER)

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _create_only(self) -> None:
        check = "create-only put"
        if not self._store.capabilities.conditional_put:
            self.report.say(check, "warn", "this store has no conditional writes", without_conditions(self._store))
            return
        key, expect = self._key("create-only"), self.report.expect

        def put(content: bytes, key: str = key) -> bool:
            try:
                self._store.put(key, [memoryview(content)], if_none_match=True)
            except PreconditionFailedError:
                return False
            return True

        def trial() -> None:
            if self._removable:
                expect(put(b"first"), "the store refused to create an object that did not exist")
            there = self._store.get(key)[0]
            for content in (b"second", b"third"):
                expect(not put(content), "the store ignores If-None-Match and overwrote an object")
            expect(self._store.get(key)[0] == there, "the store refused to create the object again, but overwrote it")
            if not self._removable:
                return
            race = self._key("race")
            won: list[bool] = []
            with TaskGroup(RACERS, name="bucketpoint-doctor") as group:
                for racer in range(RACERS):
                    group.start(lambda racer=racer: won.append(put(b"%d" % racer, race)))  # type: ignore[misc]
            expect(sum(won) == 1, f"{sum(won)} of {RACERS} writers at once were told that they had created it")

        said = f"refused twice, and won by one of {RACERS} at once" if self._removable else "refused twice"
        self.report.attempt(check, trial, said, remedy=without_conditions(self._store))

    def _if_match(self) -> str | None:
        """Check conditional replacement. Returns the ETag of a replaced object, or None if conditions do not work."""
        able = self._store.capabilities
        if not (able.conditional_put and able.conditional_replace):
            return None
        key = self._key("if-match")

        def trial() -> str | None:
            first = self._store.put(key, [memoryview(b"first")])
            self._store.put(key, [memoryview(b"second")], if_match=first.etag)
            try:
                self._store.put(key, [memoryview(b"third")], if_match=first.etag)
            except PreconditionFailedError:
                return first.etag
            raise StoreError("the store ignores If-Match and overwrote an object that had changed")

        said = "honoured where the object is the expected one, refused where it is not"
        return self.report.attempt("put if match", trial, said, remedy=without_conditions(self._store))

    def _pinned_reads(self) -> None:
        examine_pinned_read(self.report, lambda: self._store.put(self._key("pinned"), [memoryview(b"x")]))

    def _checksums(self) -> None:
        if not self._store.capabilities.checksums:
            self.report.say("checksum", "skip", "no checksums are sent to this store: a load compares what it reads")
            return
        body, key = memoryview(b"checksum"), self._key("checksum")

        def trial() -> None:
            self._store.put(key, [body], crc32c=crc32c(body))
            try:
                self._store.put(key, [body], crc32c=crc32c(body) ^ 1)
            except CorruptDataError:
                return
            raise StoreError("the store took a body with a wrong CRC32C")

        remedy = "Bytes damaged during the upload are noticed only at load; checksums=false saves sending checksums"
        self.report.attempt("checksum", trial, "a body with a wrong CRC32C is refused", remedy=remedy, warn=True)

    # -- multipart ----------------------------------------------------------------------------------------------------

    def _multipart(self) -> None:
        store = self._store
        if not store.capabilities.multipart:
            self.report.say("multipart", "skip", "this store takes whole objects only")
            return
        key = self._key("multipart")
        upload = self.report.attempt("multipart create", lambda: self._begin(key), "an upload was begun")
        if upload is None:
            return
        size = store.capabilities.min_part_bytes
        bodies = [memoryview(bytes(size)), memoryview(b"end")]

        def send() -> list[object]:
            return [store.put_part(key, upload, number, [body]) for number, body in enumerate(bodies, 1)]

        parts = self.report.attempt("multipart upload", send, "two parts were sent")
        if parts is not None and not self._removable:
            self.report.say("multipart complete", "skip", f"not tried: {size >> 20} MiB would stay, as {_STAYS}")
        elif parts is not None:

            def finish() -> None:
                store.complete_multipart(key, upload, parts)  # type: ignore[arg-type]
                self._uploads.remove((key, upload))
                self.report.expect(store.head(key).size == size + 3, "the object has another size than its parts")

            self.report.attempt("multipart complete", finish, "the object is the sum of its parts")
        dropped = self._key("aborted")
        other = self.report.quietly(lambda: self._begin(dropped))
        if other is None:
            return
        remedy = "The uploads of a killed save can then be aborted only by a lifecycle rule"
        self.report.attempt(
            "multipart list",
            lambda: self.report.expect(other in self._open(dropped), "an open multipart upload is not listed"),
            "open multipart uploads are listed",
            remedy=remedy,
            warn=True,
        )

        def drop() -> None:
            store.abort_multipart(dropped, other)
            self._uploads.remove((dropped, other))
            self.report.expect(other not in self._try_open(dropped), "the upload still exists after it was aborted")

        self.report.attempt("multipart abort", drop, "an upload was aborted")

    def _begin(self, key: str) -> str:
        upload = self._store.create_multipart(key)
        self._uploads.append((key, upload))
        return upload

    def _open(self, key: str) -> list[str]:
        return [upload.upload_id for upload in self._store.list_multipart(key)]

    def _try_open(self, key: str) -> list[str]:
        return self.report.quietly(lambda: self._open(key)) or []

    # -- cleaning up --------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Delete everything that was written, and report the keys that could not be deleted."""
        for key, upload in list(self._uploads):
            if self.report.quietly(lambda key=key, upload=upload: self._drop(key, upload)) is None:  # type: ignore[misc]
                self.left.append(key)
                self.report.say("clean-up", "warn", f"the multipart upload of {key} stays", "Abort the upload by hand")
        if not self._keys:
            return
        failures = self.report.quietly(lambda: [failure.key for failure in self._store.delete(list(self._keys))])
        left = list(self._keys) if failures is None else failures
        self.left += left
        if left:
            what = "1 object stays" if len(left) == 1 else f"{len(left)} objects stay"
            message = f"{what}: {first_of(left, _NAMED, last=', and ')}"
            if left == [self._at.lasting]:
                message += ", of a few bytes; every run of doctor writes the same one"
            self.report.say("clean-up", "warn", message, removal(self._store, self._prefix))
        else:
            self.report.say("clean-up", "ok", "everything that was written is deleted")

    def _drop(self, key: str, upload: str) -> bool:
        self._store.abort_multipart(key, upload)
        return True

    def _key(self, name: str) -> str:
        """Return the key of a trial object: a new key if it can be deleted again, else the one lasting key."""
        key = self._at.folder + name if self._removable else self._at.lasting
        self._remember(key)
        return key

    def _remember(self, key: str) -> None:
        self._keys[key] = None
