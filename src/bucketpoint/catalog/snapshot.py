"""Snapshot of a run's catalog: parsed listings, and the rows that a plan is made from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from bucketpoint.retention.rows import FULL, Row

KEEP = "keep"
DELETE = "delete"
THIN = "thin"

BEGUN_BYTES = 4096
"""Least size of a claimed tombstone. Waiting tombstones are smaller, so that a listing shows which are claimed."""

SAFETY_AGE_S = 48 * 3600.0
"""Age in seconds at which an attempt counts as dead. Far above the longest save."""

BY_STEP = attrgetter("step", "created", "id")
_BY_TIME = attrgetter("created", "step", "id")

CLOCKS_S = 900.0
"""Limit on the difference between clocks of one store's servers, in seconds: S3 refuses requests 15 minutes off."""


@dataclass(frozen=True)
class Checkpoint:
    """A commit, with the facts that the key of its record encodes.

    Attributes:
        id: token of the attempt that committed.
        mark: short hash of the ETag of the committed `.metadata`.
        folder: path below the run's root.
        groups: bytes by object group.
        key: key of the record; None if there is none yet.
        written: time at which the record was written, by the store's clock, in seconds since the epoch.
        ahead: seconds by which the record's time of commit is later than `written`; `created` is then `written`.
    """

    step: int
    created: float
    id: str
    kind: str
    mark: str
    folder: str
    groups: Mapping[str, int] = field(default_factory=dict)
    key: str | None = None
    written: float | None = None
    ahead: float = 0.0

    @property
    def name(self) -> tuple[str, str]:
        """Folder and id, which together name one commit."""
        return self.folder, self.id


@dataclass(frozen=True)
class Attempt:
    """A save that has an intent: under way, dead, or committed."""

    step: int
    token: str
    folder: str
    key: str
    started: float | None
    """Seconds since the epoch, by the store's clock."""

    def is_live(self, now: float | None, age: float = SAFETY_AGE_S) -> bool:
        """Return True if the attempt may still commit. On a store without times, always True."""
        return self.started is None or now is None or now - self.started < age


@dataclass(frozen=True)
class Tombstone:
    """Order to delete or thin a checkpoint at `due`, by the store's clock.

    Attributes:
        etag: ETag of the tombstone as listed.
        begun: True if a pruner has claimed the tombstone, and may have begun to delete.
        by_policy: True if a prune by a policy wrote it; False if a person, a rollback or a restore did.
    """

    step: int
    id: str
    due: float
    action: str
    mark: str
    folder: str
    key: str
    etag: str | None = None
    begun: bool = False
    by_policy: bool = False

    @property
    def name(self) -> tuple[str, str]:
        return self.folder, self.id

    @property
    def is_revocable(self) -> bool:
        """True if a prune whose policy keeps the checkpoint may still withdraw it."""
        return self.by_policy and not self.begun

    def is_due(self, now: float | None) -> bool:
        """Return True if `due` has passed by the store's clock. On a store without times: if `due` is 0."""
        return self.due <= (0.0 if now is None else now)


@dataclass(frozen=True)
class Pin:
    """Request to keep a step: until `expires` by the store's clock, or without limit if it is None."""

    step: int
    id: str
    expires: float | None
    key: str

    def holds(self, now: float | None) -> bool:
        return self.expires is None or now is None or now < self.expires


@dataclass(frozen=True)
class ReadLease:
    """Lease of a reader, valid for `seconds` plus `CLOCKS_S` after its last heartbeat, at `beaten`."""

    step: int
    holder: str
    seconds: float
    beaten: float | None
    key: str

    def valid(self, now: float | None) -> bool:
        # A store without times must not end a lease early.
        return self.beaten is None or now is None or now <= self.beaten + self.seconds + CLOCKS_S


@dataclass(frozen=True)
class MetricReport:
    """One metric of a step, reported at `time` by the job's clock and at `written` by the store's.

    A report with a `token` belongs to the commit with this token. One without a token, written by version 0.2 or before
    the save, belongs to every commit of the step.
    """

    step: int
    time: float
    name: str
    value: float
    key: str
    token: str | None = None
    written: float | None = None


@dataclass(frozen=True)
class Resume:
    """Note that a job resumed from the step, at `time` by the job's clock and at `written` by the store's."""

    step: int
    time: float
    key: str
    written: float | None = None


@dataclass(frozen=True)
class Notes:
    """All notes on steps, with or without a checkpoint.

    Tombstones are stored with the records, not with the other notes. `void`: remains of withdrawn tombstones.
    """

    reports: tuple[MetricReport, ...] = ()
    pins: tuple[Pin, ...] = ()
    leases: tuple[ReadLease, ...] = ()
    resumes: tuple[Resume, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    void: tuple[Tombstone, ...] = ()

    def keys_of(self, step: int | None = None) -> set[str]:
        """Return the keys of the notes on `step`, or on all steps, without tombstones."""
        notes: list[MetricReport | Pin | ReadLease | Resume] = [*self.reports, *self.pins, *self.leases, *self.resumes]
        return {note.key for note in notes if step in (None, note.step)}


@dataclass(frozen=True)
class Snapshot:
    """The catalog at the time `taken`, by the store's clock; None if the store returns no times.

    Attributes:
        checkpoints: one for each folder, sorted by step. Checkpoints without a record are included only by
            `Catalog.with_unrecorded` and `Observer`.
        superseded: records of commits that another commit in the same folder has replaced.
        attempts: attempts that have an intent and no record.
        finished: attempts that have a record and still have their intent.
        misleading: keys of superseded records that seem as young as the present commit's record, or younger.
        gone: checkpoints whose record exists and whose commit does not. No rule counts them.
        runs: name of the run that owns the folders; empty if the run has no name. Several names only while two runs
            claim the folders at once.
    """

    taken: float | None
    checkpoints: tuple[Checkpoint, ...]
    superseded: tuple[Checkpoint, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    finished: tuple[Attempt, ...] = ()
    notes: Notes = field(default_factory=Notes)
    runs: frozenset[str] = frozenset()
    gone: tuple[Checkpoint, ...] = ()
    misleading: tuple[str, ...] = ()

    def without_gone(self, gone: Collection[Checkpoint]) -> Snapshot:
        """Return the snapshot with these checkpoints moved to `gone`."""
        names = {checkpoint.name for checkpoint in gone}
        left = tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.name not in names)
        return replace(self, checkpoints=left, gone=(*self.gone, *gone))

    def with_current(self, current: Checkpoint, records: Sequence[Checkpoint]) -> Snapshot:
        """Return the snapshot in which the record `current` of a folder takes the place of the first of `records`."""
        first = records[0]
        return replace(
            self,
            checkpoints=tuple(current if record is first else record for record in self.checkpoints),
            superseded=tuple(first if record is current else record for record in self.superseded),
            misleading=(*self.misleading, *(record.key for record in records if record is not current and record.key)),
        )

    def with_notes(self, notes: Notes) -> Snapshot:
        """Return the snapshot with these notes and its own tombstones."""
        return replace(self, notes=replace(notes, tombstones=self.notes.tombstones, void=self.notes.void))

    def rows(self) -> list[Row]:
        """Return the rows that the rules decide on: checkpoints with a record that are not given up.

        A checkpoint with a policy's tombstone is a row until a pruner claims the tombstone: the policy or a metric may
        change before. With another tombstone it is a row only if its step is held and the tombstone is not claimed.
        """
        given_up = self.given_up()
        # A suspended pruner may have claimed these, and deletes the checkpoints when it wakes, even if they are held.
        begun = {stone.name for stone in self.notes.tombstones if stone.begun and stone.action == DELETE}
        revocable = [stone for stone in self.notes.tombstones if stone.is_revocable]
        # If a checkpoint has two tombstones, the one for deletion takes precedence.
        ordered = {stone.name: stone.action for stone in sorted(revocable, key=lambda stone: stone.action == DELETE)}
        held = self.held()
        metrics = self.metrics()
        return [
            Row(
                step=checkpoint.step,
                created=checkpoint.created,
                id=checkpoint.id,
                kind=checkpoint.kind,
                bytes=sum(checkpoint.groups.values()),
                groups=dict(checkpoint.groups),
                metrics=metrics.get(checkpoint.name, {}),
                pinned="pinned" in held.get(checkpoint.step, ()),
                leased="leased" in held.get(checkpoint.step, ()),
                restored_from="restored from" in held.get(checkpoint.step, ()),
                tombstone=ordered.get(checkpoint.name),
            )
            for checkpoint in self.recorded
            # If the step is held, its tombstone will be withdrawn, so the checkpoint counts.
            if checkpoint.name not in given_up or (checkpoint.step in held and checkpoint.name not in begun)
        ]

    @property
    def recorded(self) -> tuple[Checkpoint, ...]:
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.key is not None)

    @property
    def unrecorded(self) -> tuple[Checkpoint, ...]:
        """Checkpoints without a record, which no rule considers."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.key is None)

    def doubtful(self) -> list[list[Checkpoint]]:
        """Return the records of each folder whose youngest record is uncertain, the presumed youngest first.

        Another record has the same time of commit as that one, or was written no earlier by the store's clock.
        """
        groups = (
            [youngest, *(record for record in self.superseded if record.folder == youngest.folder)]
            for youngest in self.checkpoints
        )
        return [group for group in groups if any(_may_be_younger(record, group[0]) for record in group[1:])]

    @property
    def ahead(self) -> dict[int, float]:
        """By step: seconds by which the commit time in a record is later than the record's write."""
        return {checkpoint.step: checkpoint.ahead for checkpoint in self.recorded if checkpoint.ahead}

    @property
    def full(self) -> tuple[Checkpoint, ...]:
        """The checkpoints from which a job can resume."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.kind == FULL)

    @property
    def folders(self) -> set[str]:
        return {checkpoint.folder for checkpoint in self.checkpoints}

    def going(self) -> set[tuple[str, str]]:
        """Return (folder, id) of the checkpoints that have a tombstone for deletion."""
        return {stone.name for stone in self.notes.tombstones if stone.action == DELETE}

    def given_up(self) -> set[tuple[str, str]]:
        """Return (folder, id) of the checkpoints whose deletion no policy can withdraw.

        A person, a rollback or a restore ordered it, or a pruner has claimed the tombstone.
        """
        stones = self.notes.tombstones
        return {stone.name for stone in stones if stone.action == DELETE and not stone.is_revocable}

    def spared(self, fates: Mapping[tuple[int, str], str]) -> list[Tombstone]:
        """Return the tombstones that a policy withdraws. `fates` maps (step, id) to the action that it plans now."""
        revocable = [stone for stone in self.notes.tombstones if stone.is_revocable]
        void = {DELETE: (KEEP, THIN), THIN: (KEEP,)}
        return [stone for stone in revocable if fates.get((stone.step, stone.id)) in void[stone.action]]

    def without(self, tombstones: Collection[Tombstone]) -> Snapshot:
        keys = {stone.key for stone in tombstones}
        left = tuple(stone for stone in self.notes.tombstones if stone.key not in keys)
        return replace(self, notes=replace(self.notes, tombstones=left))

    def metrics(self) -> dict[tuple[str, str], dict[str, float]]:
        """Return the metrics by checkpoint (folder, id) and name. Of several values the last reported one counts."""
        steps: dict[int, list[Checkpoint]] = {}
        for checkpoint in self.checkpoints:
            steps.setdefault(checkpoint.step, []).append(checkpoint)
        metrics: dict[tuple[str, str], dict[str, float]] = {}
        for report in sorted(self.notes.reports, key=attrgetter("time", "key")):
            for checkpoint in steps.get(report.step, ()):
                # Metrics of a replaced commit must not rank the commit that replaced it.
                if report.token in (None, checkpoint.id):
                    metrics.setdefault(checkpoint.name, {})[report.name] = report.value
        return metrics

    def metric_names(self) -> frozenset[str]:
        return frozenset(report.name for report in self.notes.reports)

    def held(self) -> dict[int, set[str]]:
        """Return the steps that must be kept at the moment, with the reasons: pinned, leased or restored from."""
        notes = self.notes
        holds = [(pin.step, "pinned") for pin in notes.pins if pin.holds(self.taken)]
        holds += [(lease.step, "leased") for lease in notes.leases if lease.valid(self.taken)]
        holds += [(resume.step, "restored from") for resume in self.resumed]
        held: dict[int, set[str]] = {}
        for step, reason in holds:
            held.setdefault(step, set()).add(reason)
        return held

    @property
    def resumed(self) -> tuple[Resume, ...]:
        """The resumes after which no full checkpoint was committed, by the jobs' clocks or by the store's.

        The store's times matter if the clock of the resuming job is behind that of the saving job.
        """
        never = float("-inf")
        created = max((checkpoint.created for checkpoint in self.full), default=never)
        written = max((one.written for one in self.full if one.written is not None), default=never)
        return tuple(
            resume
            for resume in self.notes.resumes
            if resume.time >= created or (resume.written is not None and resume.written > written)
        )

    def newest(self) -> set[tuple[str, str]]:
        """Return (folder, id) of the newest checkpoints, which are never deleted.

        These are the newest full checkpoint, and the newest of any kind, each by step and by time. Given-up checkpoints
        count only if no others are left: after a rollback, they have the highest steps.
        """
        given_up = self.given_up()
        sets = ([one for one in some if one.name not in given_up] or some for some in (self.full, self.checkpoints))
        return {max(some, key=key).name for some in sets if some for key in (BY_STEP, _BY_TIME)}


def _may_be_younger(one: Checkpoint, youngest: Checkpoint) -> bool:
    if one.created == youngest.created:
        return True
    # `>=` and not `>`, because S3 reports whole seconds.
    return one.written is not None and youngest.written is not None and one.written >= youngest.written
