"""Examination of a store's fitness for checkpoints: tries the requests of saves, loads and prunes, and cleans up.

Each check ends in a finding; an error of the store is never raised. Scratch objects are below `_bucketpoint/doctor/`,
where a trainer may delete objects, which it may not elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bucketpoint.doctor.bucket import bucket_findings, clock_finding, folder_finding, fsspec_findings, service_finding
from bucketpoint.doctor.report import (
    UNREACHABLE,
    Finding,
    Report,
    examine_pinned_read,
    examine_reader,
    expect,
    lack_of_conditions,
    needed,
    refused,
    without_conditions,
)
from bucketpoint.doctor.scratch import ScratchKeys
from bucketpoint.doctor.throughput import Speed, measure
from bucketpoint.errors import (
    CorruptDataError,
    CredentialsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    first_of,
)
from bucketpoint.stores import LocalStore, Part, Store
from bucketpoint.stores.fsspec import FsspecStore
from bucketpoint.stores.retry import deadline
from bucketpoint.stores.s3 import S3Store
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.tasks import TaskGroup

RACERS = 8
PATIENCE_S = 60.0
"""Seconds after which checks, and the clean-up, retry no request: the store may be down."""

ADMIN, TRAINER, READER, PRUNER = "admin", "trainer", "reader", "pruner"
"""The roles of `policies/`, and ADMIN, which saves, loads and prunes."""

_STAYS = "objects could not be deleted"


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
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
    probe_bytes: int = 128 << 20,
    told: Callable[[Finding], None] = lambda finding: None,
) -> Diagnosis:
    """Try the requests of `role` below `prefix`, in a folder with a random name, and delete that folder.

    The permission to delete is checked before any object is written. Without it, one object of a few bytes is written
    and stays, under the same key each time, and checks that need another object are skipped.

    Args:
        role: `ADMIN`, `TRAINER`, `READER` or `PRUNER`. A reader writes nothing; a pruner writes notes and deletes.
            Throughput is measured for roles that save.
        probe_bytes: approximate number of bytes to upload, and to download, to measure throughput; 0 to skip this.
        told: function that is called with each finding immediately.
    """
    run = _Examination(Report(store, told), prefix, role)
    made = _missing_folders(store)
    try:
        run.all(probe_bytes)
    finally:
        with deadline(PATIENCE_S):
            run.clean_up()
        with contextlib.suppress(OSError):
            for folder in made:
                os.rmdir(folder)
    return Diagnosis(run.report.findings, run.speed, run.left)


def _missing_folders(store: Store) -> list[str]:
    """Return the folders that an examination of a local folder will make, the deepest first."""
    missing: list[str] = []
    folder = store.root if isinstance(store, LocalStore) else ""
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


class _Examination:
    """One examination, with the keys that it wrote, so that `clean_up` can delete them."""

    def __init__(self, report: Report, prefix: str, role: str) -> None:
        self.report = report
        self._store = report.store
        self._prefix = prefix
        self._role = role
        self._at = ScratchKeys.below(prefix)
        # Denied access to a request that the role does not need is no fault of the store.
        needless = f"not read: a {role} does not need it. Credentials of an administrator show it"
        self._spared = None if role == ADMIN else needless
        self._removable = True
        self._wrote_data = False
        self._keys: dict[str, None] = {}
        self._uploads: list[tuple[str, str]] = []
        self.left: list[str] = []
        self.speed: Speed | None = None

    def all(self, probe_bytes: int) -> None:
        with deadline(PATIENCE_S):
            written = self._checks()
        if probe_bytes and written and self._role != PRUNER:
            if self._removable:
                self.speed = measure(self.report, self._at.folder, probe_bytes, used=self._remember)
            else:
                self.report.say("throughput", "skip", f"not measured: {_STAYS}")

    def _checks(self) -> bool:
        """Run all checks but that of the throughput. Return True if objects can be written."""
        report, store, written = self.report, self._store, False
        try:
            if self._role == READER:
                examine_reader(report, self._prefix)
            else:
                written = self._access()
        except UNREACHABLE as error:
            report.failed("connect", error)
            if isinstance(store, S3Store) and isinstance(error, CredentialsError):
                # A store refuses all requests from a machine whose clock is wrong.
                finding = clock_finding(store)
                report.add(*[finding] * (finding.status == "fail"))
            return False
        if isinstance(store, S3Store):
            report.add(clock_finding(store))
        if self._role == READER:
            return False
        if written:
            self._requests()
        report.add(*bucket_findings(store, self._prefix, spared=self._spared))
        if isinstance(store, LocalStore) and written:
            free = shutil.disk_usage(store.root).free
            report.say("space", "ok", f"{free / 1e9:.1f} GB are free on the filesystem of the folder {store.root}")
        return written

    def _requests(self) -> None:
        report, store = self.report, self._store
        if isinstance(store, FsspecStore) and self._removable:
            # First, because the trial of the conditions decides the store's capabilities for the checks below.
            report.add(*fsspec_findings(store, self._at.folder.rstrip("/")))
        elif isinstance(store, FsspecStore):
            report.say("filesystem", "skip", f"conditions were not tried: {_STAYS}")
        if isinstance(store, LocalStore):
            report.add(folder_finding(store, self._key("links")))
        self._create_only()
        self._beside(self._if_match())
        examine_pinned_read(report, lambda: store.put(self._key("pinned"), [memoryview(b"x")]))
        self._checksums()
        if store.capabilities.multipart:
            self._multipart()
        else:
            report.say("multipart", "skip", "this store takes whole objects only")
        if isinstance(store, S3Store):
            report.add(service_finding(store, self._key, self._begin))

    def _access(self) -> bool:
        """Check the permissions to put, get, list and delete. Return False if nothing can be written.

        Raises an error of `UNREACHABLE` if the store cannot be reached.
        """
        report, store, pruner = self.report, self._store, self._role == PRUNER
        data_stays, notes_stay = self._why_kept(self._at.data), self._why_kept(self._at.folder + "access")
        self._removable = notes_stay is None
        self._wrote_data = beside = data_stays is None and not pruner
        key, body = self._at.data if beside else self._key("access"), b"bucketpoint doctor"
        self._remember(key)
        lasting = key == self._at.lasting
        try:
            with contextlib.suppress(PreconditionFailedError):
                # An object of an earlier examination is enough: on some stores, replacing it needs the right to delete.
                store.put(key, [memoryview(body)], if_none_match=lasting and store.capabilities.conditional_put)
        except StoreError as error:
            # Nothing was written, so there is nothing to clean up.
            self._keys.clear()
            if isinstance(error, UNREACHABLE):
                raise
            report.failed("put", error, right=needed(store, "put notes" if pruner else "put"))
            return False
        report.say("put", "ok", "objects can be written" if beside else "notes can be written")
        with report.trial("get", "objects can be read", right=needed(store, "get")):
            expect(store.get(key)[0] == body or lasting, "the bytes read differ from the bytes written")
        with report.trial("list", "objects can be listed", right=needed(store, "list"), warn=not pruner):
            listed = store.list(key.rpartition("/")[0] + "/")
            expect(any(info.key == key for info in listed), "a listing lacks the new object")
        if self._role in (ADMIN, PRUNER):
            self._deletes("delete", "objects", data_stays, key if beside else None)
        self._deletes("delete notes", "notes", notes_stay, self._at.folder + "deleted")
        self._removable = report.passed
        return True

    def _why_kept(self, key: str) -> str | None:
        """Delete a key. Return the reason if the deletion is refused, otherwise None."""
        try:
            failures = self._store.delete([key])
        except UNREACHABLE:
            raise
        except StoreError as error:
            return error.message
        return f"{failures[0].code}: {failures[0].message}" if failures else None

    def _deletes(self, check: str, what: str, reason: str | None, key: str | None) -> None:
        """Check the permission to delete.

        Args:
            reason: why the deletion of a missing object was refused, or None.
            key: key at which an object is written and deleted; None to skip that.
        """
        right, warn = needed(self._store, check), self._role != PRUNER
        with self.report.trial(check, f"{what} can be deleted", right=right, warn=warn):
            if reason is None and key is not None:
                self._remember(key)
                self._store.put(key, [memoryview(b"x")])
                reason = self._why_kept(key)
                if reason is None:
                    gone = refused(ObjectNotFoundError, lambda: self._store.head(key))
                    expect(gone, "the object still exists after its deletion")
                    del self._keys[key]
            expect(reason is None, reason or "")

    def _beside(self, etag: str | None) -> None:
        """Check the permission to write by a PUT whose condition fails: an object at this key could not be deleted.

        Args:
            etag: ETag of another object; None if the store does not honour conditions.
        """
        check, key = "put data", self._at.data
        if self._role == PRUNER:
            check, key = "put .metadata", self._at.metadata
        elif self._wrote_data:
            return
        if etag is None:
            self.report.say(check, "skip", f"not tried: {_STAYS}, and no condition of this store prevents the write")
            return
        right, warn = needed(self._store, check), self._role == PRUNER
        with self.report.trial(check, "a write is refused for its condition alone", right=right, warn=warn):
            body = [memoryview(b"x")]
            if not refused(PreconditionFailedError, lambda: self._store.put(key, body, if_match=etag)):
                self._remember(key)
                raise StoreError("the store ignores If-Match if there is no object")

    def _create_only(self) -> None:
        check, store = "create-only put", self._store
        if not store.capabilities.conditional_put:
            self.report.say(check, "warn", lack_of_conditions(store), without_conditions(store))
            return
        key, race = self._key("create-only"), self._at.folder + "race"
        won: list[bool] = []

        def created(content: bytes, key: str = key) -> bool:
            body = [memoryview(content)]
            return not refused(PreconditionFailedError, lambda: store.put(key, body, if_none_match=True))

        success = "refused twice" + (f"; of {RACERS} concurrent writers, one succeeded" if self._removable else "")
        with self.report.trial(check, success, remedy=without_conditions(store)):
            if self._removable:
                expect(created(b"first"), "the store refused to create an object that did not exist")
            there = store.get(key)[0]
            for content in (b"second", b"third"):
                expect(not created(content), "the store ignores If-None-Match and overwrote an object")
            expect(store.get(key)[0] == there, "the store refused to create the object again, but overwrote it")
            if self._removable:
                self._remember(race)
                with TaskGroup(RACERS, name="bucketpoint-doctor") as group:
                    for racer in range(RACERS):
                        group.start(lambda racer=racer: won.append(created(b"%d" % racer, race)))  # type: ignore[misc]
                expect(sum(won) == 1, f"the store confirmed the creation to {sum(won)} of {RACERS} concurrent writers")

    def _if_match(self) -> str | None:
        """Check conditional replacement. Return the ETag of a replaced object, or None if conditions do not work."""
        store = self._store
        if not (store.capabilities.conditional_put and store.capabilities.conditional_replace):
            return None
        key, success = self._key("if-match"), "honoured if the object is the expected one, refused if it is not"
        with self.report.trial("put if match", success, remedy=without_conditions(store)):
            etag = store.put(key, [memoryview(b"first")]).etag
            store.put(key, [memoryview(b"second")], if_match=etag)
            stale = refused(PreconditionFailedError, lambda: store.put(key, [memoryview(b"third")], if_match=etag))
            expect(stale, "the store ignores If-Match and overwrote an object that had changed")
        return etag if self.report.passed else None

    def _checksums(self) -> None:
        check, store = "checksum", self._store
        if not store.capabilities.checksums:
            self.report.say(check, "skip", "no checksums are sent to this store: a load verifies what it reads")
            return
        body, key = memoryview(b"checksum"), self._key("checksum")
        remedy = "Bytes damaged during the upload are noticed only at load; checksums=false avoids sending them"
        with self.report.trial(check, "a body with a wrong CRC32C is refused", remedy=remedy, warn=True):
            store.put(key, [body], crc32c=crc32c(body))
            wrong = refused(CorruptDataError, lambda: store.put(key, [body], crc32c=crc32c(body) ^ 1))
            expect(wrong, "the store accepted a body with a wrong CRC32C")

    def _multipart(self) -> None:
        report, store, key = self.report, self._store, self._key("multipart")
        with report.trial("multipart create", "an upload was begun"):
            upload = self._begin(key)
        if not report.passed:
            return
        size, parts = store.capabilities.min_part_bytes, list[Part]()
        with report.trial("multipart upload", "two parts were sent"):
            bodies = [memoryview(bytes(size)), memoryview(b"end")]
            parts = [store.put_part(key, upload, number, [body]) for number, body in enumerate(bodies, 1)]
        if parts:
            # Some stores list an upload only once it has parts.
            spared = self._spared if self._role == TRAINER else None
            success = "open multipart uploads are listed"
            remedy = "The uploads of a killed save can then be aborted only by a lifecycle rule"
            with report.trial("multipart list", success, remedy=remedy, warn=True, spared=spared):
                expect(self._is_open(key, upload), "an open multipart upload is not listed")
        if parts and not self._removable:
            report.say("multipart complete", "skip", f"not tried: {_STAYS}, so {size >> 20} MiB would stay")
        elif parts:
            with report.trial("multipart complete", "the object is the sum of its parts"):
                store.complete_multipart(key, upload, parts)
                self._uploads.remove((key, upload))
                expect(store.head(key).size == size + 3, "the object has another size than its parts")
        dropped = self._key("aborted")
        try:
            other = self._begin(dropped)
        except StoreError:
            return
        with report.trial("multipart abort", "an upload was aborted"):
            store.abort_multipart(dropped, other)
            self._uploads.remove((dropped, other))
            still_open = False
            with contextlib.suppress(StoreError):
                still_open = self._is_open(dropped, other)
            expect(not still_open, "the upload still exists after it was aborted")

    def _begin(self, key: str) -> str:
        upload = self._store.create_multipart(key)
        self._uploads.append((key, upload))
        return upload

    def _is_open(self, key: str, upload: str) -> bool:
        return upload in [entry.upload_id for entry in self._store.list_multipart(key)]

    def clean_up(self) -> None:
        """Delete everything that was written, and report the keys that could not be deleted."""
        for key, upload in self._uploads:
            try:
                self._store.abort_multipart(key, upload)
            except StoreError:
                self.left.append(key)
                self.report.say("clean-up", "warn", f"the multipart upload of {key} stays", "Abort the upload by hand")
        if not self._keys:
            return
        left = list(self._keys)
        with contextlib.suppress(StoreError):
            left = [failure.key for failure in self._store.delete(left)]
        self.left += left
        if left:
            count = "1 object stays" if len(left) == 1 else f"{len(left)} objects stay"
            message = f"{count}: {first_of(left, last=', and ')}"
            if left == [self._at.lasting]:
                message += ", of a few bytes; each run of doctor overwrites it"
            url = f"{self._store.url}/{self._prefix}" if self._prefix else self._store.url
            remedy = (
                f"`bucketpoint gc {url}` removes objects of doctor that are older than 48 h, with credentials that "
            )
            self.report.say("clean-up", "warn", message, remedy + "may delete")
        else:
            self.report.say("clean-up", "ok", "everything that was written is deleted")

    def _key(self, name: str) -> str:
        """Return the key of a trial object: a new key if objects can be deleted, else the one lasting key."""
        key = self._at.folder + name if self._removable else self._at.lasting
        self._remember(key)
        return key

    def _remember(self, key: str) -> None:
        self._keys[key] = None
