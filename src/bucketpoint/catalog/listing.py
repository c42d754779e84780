"""Parser of a catalog's listings: checkpoints, attempts, tombstones and notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from bucketpoint.catalog.snapshot import (
    BEGUN_BYTES,
    BY_STEP,
    DELETE,
    THIN,
    Attempt,
    Checkpoint,
    MetricReport,
    Notes,
    Pin,
    ReadLease,
    Resume,
    Snapshot,
    Tombstone,
)
from bucketpoint.format import catalog_keys
from bucketpoint.format.catalog_keys import AttemptKey, CommitKey, NoteKey, StepTemplate
from bucketpoint.format.record import FUTURE_S
from bucketpoint.retention.rows import FULL
from bucketpoint.stores import ObjectInfo


def read_steps(listed: Iterable[tuple[str, ObjectInfo]], template: StepTemplate, *, taken: float | None) -> Snapshot:
    """Parse checkpoints, attempts and tombstones from a listing made at the time `taken`.

    Names of unknown form, and names with folders that do not fit `template`, are ignored.
    """
    by_folder: dict[str, list[Checkpoint]] = {}
    attempts = []
    tombstones: list[Tombstone] = []
    void: list[Tombstone] = []
    runs = set()
    for name, info in listed:
        named = CommitKey.parse(name) or AttemptKey.parse(name) or _tombstone(name, info)
        if named is not None and template.step_of(named.folder) != named.step:
            continue
        if isinstance(named, CommitKey):
            by_folder.setdefault(named.folder, []).append(_checkpoint(named, info))
        elif isinstance(named, AttemptKey):
            attempts.append(Attempt(named.step, named.token, named.folder, info.key, info.modified))
        elif named is not None:
            # A withdrawn tombstone is empty.
            (tombstones if info.size else void).append(named)
        elif run := catalog_keys.run_of(name):
            runs.add(run)
    current, superseded = [], []
    for records in by_folder.values():
        # Of two records of one attempt, that of the thinned checkpoint is later: thinning is never undone.
        *older, last = sorted(records, key=lambda one: (one.created, one.id, one.kind != FULL, one.key))
        current.append(last)
        superseded += older
    committed = {checkpoint.name for checkpoint in [*current, *superseded]}
    return Snapshot(
        taken,
        tuple(sorted(current, key=BY_STEP)),
        tuple(superseded),
        tuple(attempt for attempt in attempts if (attempt.folder, attempt.token) not in committed),
        tuple(attempt for attempt in attempts if (attempt.folder, attempt.token) in committed),
        Notes(tombstones=tuple(tombstones), void=tuple(void)),
        frozenset(runs),
    )


def _checkpoint(commit: CommitKey, info: ObjectInfo) -> Checkpoint:
    # A record is written after its commit. A time of commit later than that write comes from a clock that was ahead,
    # and is corrected: otherwise every other checkpoint would seem old.
    created, written = commit.created, info.modified
    ahead = created - written if written is not None and created - written > FUTURE_S else 0.0
    return Checkpoint(
        commit.step,
        created - ahead,
        commit.token,
        commit.kind,
        commit.mark,
        commit.folder,
        commit.groups,
        info.key,
        written,
        ahead,
    )


def read_notes(listed: Iterable[tuple[str, ObjectInfo]]) -> Notes:
    """Parse metrics, pins, leases and resumes from a listing. Unknown and malformed names are ignored."""
    reports: list[MetricReport] = []
    pins: list[Pin] = []
    leases: list[ReadLease] = []
    resumes: list[Resume] = []
    for name, info in listed:
        note = NoteKey.parse(name)
        if note is None:
            continue
        step, key = note.step, info.key
        with contextlib.suppress(ValueError):
            match (note.kind, *note.fields):
                case (catalog_keys.METRICS, time, *pairs) if len(pairs) % 2 == 0:
                    values = dict(zip(pairs[::2], map(float, pairs[1::2]), strict=True))
                    token = next(filter(None, map(catalog_keys.token_named, values)), None)
                    reports += [
                        MetricReport(step, _time(time), metric, value, key, token, info.modified)
                        for metric, value in values.items()
                        if not catalog_keys.token_named(metric)
                    ]
                case (catalog_keys.PIN, pin, expires):
                    pins.append(Pin(step, pin, _time(expires) if expires else None, key))
                case (catalog_keys.LEASE, holder, seconds):
                    leases.append(ReadLease(step, holder, float(seconds), info.modified, key))
                case (catalog_keys.RESTORED, time, *_):
                    resumes.append(Resume(step, _time(time), key, info.modified))
    return Notes(tuple(reports), tuple(pins), tuple(leases), tuple(resumes))


def _tombstone(name: str, info: ObjectInfo) -> Tombstone | None:
    note = NoteKey.parse(name)
    if note is None or note.kind != catalog_keys.TOMBSTONE or len(note.fields) < 5:
        return None
    token, moment, action, mark, folder, *author = note.fields
    if author not in ([], [catalog_keys.BY_POLICY]):
        return None
    due = catalog_keys.seconds(moment)
    if due is None or action not in (DELETE, THIN):
        return None
    # A claimed tombstone has at least `BEGUN_BYTES`: the size in a listing shows the state.
    begun = info.size >= BEGUN_BYTES
    return Tombstone(note.step, token, due, action, mark, folder, info.key, info.etag, begun, bool(author))


def _time(text: str) -> float:
    time = catalog_keys.seconds(text)
    if time is None:
        raise ValueError("not a time")
    return time
