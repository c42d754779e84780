"""Observation of a run without writes: its snapshot, its newest checkpoint, and saves that have not committed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.listing import read_notes, read_steps
from bucketpoint.catalog.records import read_record
from bucketpoint.catalog.run import size_of
from bucketpoint.catalog.snapshot import BY_STEP, Attempt, Checkpoint, Notes, Snapshot
from bucketpoint.errors import MetadataError, ObjectNotFoundError, first_of
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import OTHER
from bucketpoint.format.index.ref import index_path
from bucketpoint.format.record import CommitRecord
from bucketpoint.stores import ObjectInfo
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

LISTED_ATTEMPTS = 8
"""Limit on the attempts whose objects are listed. A run rarely has more than two saves under way."""

_TRIED = 5
"""Limit on the checkpoints whose `.metadata` is requested, newest first."""


@dataclass(frozen=True)
class AttemptProgress:
    """A save that has not committed: under way, or dead.

    Attributes:
        token: token of its coordinator; None if the save has no intent, as with plain writers.
        started: time of the intent, or of the oldest object if there is no intent; None if neither is known.
        objects, bytes: complete data objects in the store, and their size; None if they were not listed.
        latest: time at which the newest of these objects was completed.
    """

    step: int
    folder: str
    token: str | None = None
    started: float | None = None
    objects: int | None = None
    bytes: int | None = None
    latest: float | None = None

    def is_live(self, now: float | None) -> bool:
        """Return True if the save may still commit, by its start and its latest object."""
        times = [time for time in (self.started, self.latest) if time is not None]
        return Attempt(self.step, self.token or "", self.folder, "", max(times, default=None)).is_live(now)


@dataclass(frozen=True)
class Observation:
    """State of a run at the time `snapshot.taken`.

    Attributes:
        snapshot: checkpoints, including those without a record, and notes.
        newest: the checkpoint that `restore("latest")` would try first.
        record: the record of `newest`; None if it is missing or unreadable.
        attempts: saves that have not committed, highest step first.
        problems: faults of the catalog, one sentence each.
    """

    snapshot: Snapshot
    newest: Checkpoint | None
    record: CommitRecord | None
    attempts: tuple[AttemptProgress, ...]
    problems: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        snapshot = self.snapshot
        noted = snapshot.notes != Notes() or snapshot.finished or snapshot.runs or self.problems
        return not (snapshot.checkpoints or self.attempts or noted)


@dataclass
class Observer:
    """Observer of one run. Caches commits without a record, and the newest checkpoint's record."""

    catalog: Catalog
    _commits: dict[str, Checkpoint] = field(default_factory=dict)
    _read: tuple[str, CommitRecord | None, str | None] | None = None
    _tokens: dict[str, tuple[str | None, frozenset[str]]] = field(default_factory=dict)

    def look(self) -> Observation:
        """Observe the run. No data object is read.

        One LIST for each 1,000 notes, each 1,000 records, each 1,000 folders and each attempt; small GETs for the
        newest checkpoint; a small GET and a LIST for each folder without a record whose commit is not cached.
        """
        catalog = self.catalog
        listed, noted = catalog.listed(catalog_keys.STEPS), catalog.listed(catalog_keys.NOTES)
        taken = catalog.time_of([*noted, *listed])
        snapshot = read_steps(listed, catalog.template, taken=taken).with_notes(read_notes(noted))
        problems = list(_unreadable(snapshot, [*noted, *listed]))
        there = catalog.folders()
        snapshot = snapshot.without_gone([one for one in snapshot.recorded if one.folder not in {*there}])
        problems += [f"step {one.step} has a record, but no checkpoint" for one in snapshot.gone]
        folders = {*there, *(attempt.folder for attempt in snapshot.attempts)} - snapshot.folders
        unrecorded = self._without_record(folders)
        everything = tuple(sorted([*snapshot.checkpoints, *unrecorded.values()], key=BY_STEP))
        snapshot = replace(snapshot, checkpoints=everything)
        newest, record = self._newest(snapshot, problems)
        begun = {attempt.folder for attempt in snapshot.attempts}
        saves = [
            AttemptProgress(attempt.step, attempt.folder, attempt.token, attempt.started)
            for attempt in snapshot.attempts
            if not _has_committed(attempt, unrecorded.get(attempt.folder))
        ]
        saves += [
            AttemptProgress(catalog.template.step_of(folder) or 0, folder)
            for folder in folders
            if folder not in begun and folder not in unrecorded
        ]
        return Observation(snapshot, newest, record, tuple(self._listed(saves, snapshot)), tuple(problems))

    def _without_record(self, folders: set[str]) -> dict[str, Checkpoint]:
        """Return the commits in folders without a record. The newest is requested each time: it may be replaced."""
        known = {folder: one for folder, one in self._commits.items() if folder in folders}
        if known:
            del known[max(known.values(), key=BY_STEP).folder]
        found: list[Checkpoint | None] = []
        if unknown := sorted(folders - known.keys()):
            for_each(unknown, lambda folder: found.append(self.catalog.unrecorded(folder)), TransferOptions())
        there = [one for one in found if one is not None]
        same = [former for one in there if (former := self._commits.get(one.folder)) and _same_commit(former, one)]
        known |= {one.folder: one for one in same}

        def size(one: Checkpoint) -> None:
            known[one.folder] = replace(one, groups={OTHER: size_of(self.catalog, one.folder)})

        if new := [one for one in there if one.folder not in known]:
            for_each(new, size, TransferOptions())
        self._commits = known
        return known

    def _newest(self, snapshot: Snapshot, problems: list[str]) -> tuple[Checkpoint | None, CommitRecord | None]:
        going = snapshot.going()
        ranked = sorted(snapshot.full, key=lambda one: (one.name not in going, BY_STEP(one)), reverse=True)
        for checkpoint in ranked[:_TRIED]:
            if checkpoint.key is None:
                return checkpoint, None
            committed = self.catalog.metadata_info(checkpoint.folder)
            if committed is None:
                problems.append(f"step {checkpoint.step} has a record, but no .metadata")
                continue
            if catalog_keys.mark_of(committed.etag) != checkpoint.mark:
                problems.append(f"the record of step {checkpoint.step} does not match its .metadata")
            return checkpoint, self._record(checkpoint, checkpoint.key, problems)
        return None, None

    def _record(self, checkpoint: Checkpoint, key: str, problems: list[str]) -> CommitRecord | None:
        if self._read is None or self._read[0] != key:
            try:
                self._read = key, read_record(self.catalog, key), None
            except MetadataError as error:
                self._read = key, None, f"the record of step {checkpoint.step} cannot be read: {error.message}"
        _, record, problem = self._read
        if problem is not None:
            problems.append(problem)
        return record

    def _listed(self, saves: Iterable[AttemptProgress], snapshot: Snapshot) -> Iterator[AttemptProgress]:
        """Yield the saves, highest step first. The first `LISTED_ATTEMPTS` live ones are yielded with their objects."""
        left = LISTED_ATTEMPTS
        committed = {one.id for one in (*snapshot.checkpoints, *snapshot.superseded)}
        starts = [(attempt.folder, attempt.started) for attempt in snapshot.attempts if attempt.started is not None]
        for save in sorted(saves, key=lambda one: (one.step, one.started or 0.0, one.folder), reverse=True):
            if not left or not save.is_live(snapshot.taken):
                yield save
                continue
            left -= 1
            listed = self.catalog.objects_of(save.folder)
            # A save without an intent is left out if its folder has a `.metadata`: a deletion marker, or a commit that
            # was made after the listing of commits.
            if save.token is not None or keys.METADATA not in listed:
                began = save.started if save.started is not None else 0.0
                later = [time for folder, time in starts if folder == save.folder and time > began]
                named = self._named(save.folder, listed.get(keys.METADATA))
                yield _with_objects(save, listed, committed | named, until=min(later, default=math.inf))

    def _named(self, folder: str, metadata: ObjectInfo | None) -> frozenset[str]:
        """Return the tokens that the folder's `.metadata` names. One GET for each commit.

        Otherwise a save that died in this folder would be shown with the objects of a later save that committed.
        """
        if metadata is None:
            return frozenset()
        etag, tokens = self._tokens.get(folder, (None, frozenset[str]()))
        if etag is None or etag != metadata.etag:
            try:
                tokens = frozenset(keys.tokens_in(self.catalog.store.get(metadata.key)[0]))
            except ObjectNotFoundError:
                return frozenset()
            self._tokens[folder] = metadata.etag, tokens
        return tokens


def _same_commit(former: Checkpoint, one: Checkpoint) -> bool:
    return replace(one, groups=former.groups) == former


def _has_committed(attempt: Attempt, commit: Checkpoint | None) -> bool:
    """Return True if the commit in an attempt's folder is not older than the attempt, whose record is then missing."""
    return commit is not None and attempt.started is not None and commit.created >= attempt.started


def _with_objects(
    save: AttemptProgress, listed: dict[str, ObjectInfo], committed: set[str], *, until: float
) -> AttemptProgress:
    """Return a save with the counts, sizes and times of its objects, from a listing of its folder.

    Args:
        committed: tokens of committed checkpoints, whose objects are left out.
        until: time at which the next save to the same folder began.
    """
    data = [info for path, info in listed.items() if _is_data(path, save) and keys.token_of(path) not in committed]
    if save.token is not None and save.started is not None:
        # A listing does not show to which attempt a rank's token belongs, so times of the store are compared,
        # possibly in whole seconds.
        data = [info for info in data if info.modified is None or save.started <= info.modified < until]
    times = [info.modified for info in data if info.modified is not None]
    return replace(
        save,
        started=save.started if save.started is not None else min(times, default=None),
        objects=len(data),
        bytes=sum(info.size for info in data),
        latest=max(times, default=None),
    )


def _is_data(path: str, save: AttemptProgress) -> bool:
    token = keys.token_of(path)
    if token is not None:
        # The index is left out, as in the sizes of commit records.
        return path != index_path(token)
    # Names of other writers are unknown, so any file counts. Objects in subfolders may belong to another run.
    return save.token is None and "/" not in path and keys.may_be_data(path)


def _unreadable(snapshot: Snapshot, listed: Iterable[tuple[str, ObjectInfo]]) -> Iterator[str]:
    """Yield a line about the objects of the catalog whose keys cannot be parsed."""
    notes = snapshot.notes
    read = {checkpoint.key for checkpoint in (*snapshot.checkpoints, *snapshot.superseded)}
    read |= {attempt.key for attempt in (*snapshot.attempts, *snapshot.finished)}
    read |= notes.keys_of() | {tombstone.key for tombstone in (*notes.tombstones, *notes.void)}
    names = [name for name, info in listed if info.key not in read and catalog_keys.run_of(name) is None]
    if names:
        some = "1 object of the catalog is" if len(names) == 1 else f"{len(names)} objects of the catalog are"
        yield f"{some} neither record nor note: {first_of(names)}"
