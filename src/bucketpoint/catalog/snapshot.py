"""The state of a run's catalog at one moment: made from listings, and turned into the rows of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from bucketpoint.retention.row import FULL, Row

KEEP = "keep"
DELETE = "delete"
THIN = "thin"

BEGUN_BYTES = 4096
"""Size of a tombstone that a pruner has claimed, so that a listing shows the claim. A waiting tombstone is smaller."""

SAFETY_AGE_S = 48 * 3600.0
"""Age at which an attempt counts as dead. Far above the longest save."""

BY_STEP = attrgetter("step", "created", "id")
_BY_TIME = attrgetter("created", "step", "id")

CLOCKS_S = 900.0
"""Limit on the difference of clocks, in seconds: S3 refuses requests that are 15 minutes off, and servers of one store
may differ."""


@dataclass(frozen=True)
class Checkpoint:
    """A commit, as the key of its record describes it.

    Attributes:
        id: token of the attempt that committed.
        mark: mark of the `.metadata` that was committed.
        folder: path below the run's root.
        groups: bytes by object group.
        key: key of the record; None if there is none yet.
        written: time at which the record was written, by the store's clock, in seconds since the epoch.
        ahead: seconds by which the record claims to be younger than `written`; `created` is then `written`.
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
    """A save that has begun and has no record yet: under way, dead, or committed without one."""

    step: int
    token: str
    folder: str
    key: str
    started: float | None
    """Seconds since the epoch, by the store's clock."""

    def is_live(self, now: float | None, age: float = SAFETY_AGE_S) -> bool:
        """Return True if the attempt may still commit. Without a time from the store it never counts as old."""
        return self.started is None or now is None or now - self.started < age


@dataclass(frozen=True)
class Tombstone:
    """An order to delete or thin a checkpoint at `due`, by the store's clock. `etag`: the note's ETag as listed.

    Attributes:
        begun: True if a pruner has claimed it, and may have begun to delete.
        by_policy: True if a prune by a policy wrote it. Otherwise a person or a restore gave the checkpoint up.
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
        """Folder and id of the checkpoint."""
        return self.folder, self.id

    @property
    def is_revocable(self) -> bool:
        """True if a prune whose policy keeps the checkpoint may still withdraw it."""
        return self.by_policy and not self.begun

    def is_due(self, now: float | None) -> bool:
        """Return True if its time has come by the store's clock. Without a time from the store, only 0 has come."""
        return self.due <= (0.0 if now is None else now)


@dataclass(frozen=True)
class Pin:
    """A request to keep a step, until `expires` by the store's clock if that is set."""

    step: int
    id: str
    expires: float | None
    key: str

    def holds(self, now: float | None) -> bool:
        return self.expires is None or now is None or now < self.expires


@dataclass(frozen=True)
class ReadLease:
    """A lease, valid for `seconds` after its last heartbeat, and then for as long as clocks may differ (`CLOCKS_S`)."""

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
    """One metric of a step, as reported at `time`, by its job's clock, and at `written`, by the store's.

    It belongs only to the commit with this `token`. A report without a token, of version 0.2 or from before the save,
    belongs to every commit of the step.
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
    """A note that a job resumed from the step at `time`, by its own clock, and at `written`, by the store's."""

    step: int
    time: float
    key: str
    written: float | None = None


@dataclass(frozen=True)
class Notes:
    """All notes on steps, with or without a checkpoint.

    Tombstones are stored with the records, not with other notes. `void` are the remains of withdrawn ones.
    """

    reports: tuple[MetricReport, ...] = ()
    pins: tuple[Pin, ...] = ()
    leases: tuple[ReadLease, ...] = ()
    resumes: tuple[Resume, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    void: tuple[Tombstone, ...] = ()

    def keys_of(self, step: int | None = None) -> set[str]:
        """Return the keys of the notes on a step, or on all, without tombstones."""
        notes: list[MetricReport | Pin | ReadLease | Resume] = [*self.reports, *self.pins, *self.leases, *self.resumes]
        return {note.key for note in notes if step in (None, note.step)}


@dataclass(frozen=True)
class Snapshot:
    """The catalog at the time `taken`, by the store's clock; None if the store returns no times.

    Attributes:
        checkpoints: in order, one for each folder. Those without a record are there only if they were looked for.
        superseded: records of commits that another commit in the same folder has replaced.
        finished: attempts whose intent still exists although they have a record.
        misleading: keys of superseded records that look younger than the record that counts, or as young.
        gone: checkpoints with a record whose commit is not there any more. No rule counts them.
        runs: name of the run that owns the folders; empty if the run has no name. Several names appear only while two
            runs claim the folders at once.
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
        """Return the snapshot in which these checkpoints are gone."""
        names = {checkpoint.name for checkpoint in gone}
        left = tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.name not in names)
        return replace(self, checkpoints=left, gone=(*self.gone, *gone))

    def with_current(self, current: Checkpoint, records: Sequence[Checkpoint]) -> Snapshot:
        """Return the snapshot in which `current` counts of a folder's records, and the first of them no longer does."""
        first = records[0]
        return replace(
            self,
            checkpoints=tuple(current if record is first else record for record in self.checkpoints),
            superseded=tuple(first if record is current else record for record in self.superseded),
            misleading=(*self.misleading, *(record.key for record in records if record is not current and record.key)),
        )

    def with_notes(self, notes: Notes) -> Snapshot:
        """Return the snapshot with these notes; the tombstones stay those of the snapshot."""
        return replace(self, notes=replace(notes, tombstones=self.notes.tombstones, void=self.notes.void))

    def rows(self) -> list[Row]:
        """Return the rows that the rules decide on: checkpoints with a record that have not been given up.

        A row with a tombstone by a policy stays until a pruner begins to delete it: the policy, or a metric, may have
        changed. A row with another tombstone stays if its step is held, unless a pruner has begun to delete it.
        """
        given_up = self.given_up()
        # A suspended pruner deletes these once it wakes, even if they are held by now.
        begun = {stone.name for stone in self.notes.tombstones if stone.begun and stone.action == DELETE}
        revocable = [stone for stone in self.notes.tombstones if stone.is_revocable]
        # Of two tombstones of one checkpoint the one for deletion counts.
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
            # The tombstone of a step that is held will be withdrawn, so its checkpoint stays a row.
            if checkpoint.name not in given_up or (checkpoint.step in held and checkpoint.name not in begun)
        ]

    @property
    def recorded(self) -> tuple[Checkpoint, ...]:
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.key is not None)

    @property
    def unrecorded(self) -> tuple[Checkpoint, ...]:
        """Checkpoints without a record, which no rule considers. Empty if nobody searched for them."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.key is None)

    def doubtful(self) -> list[list[Checkpoint]]:
        """Return the records of each folder in which another one may be younger than its checkpoint, which comes first.

        They may be if the jobs' clocks give equal times, or if the store's clock contradicts them.
        """
        groups = (
            [youngest, *(record for record in self.superseded if record.folder == youngest.folder)]
            for youngest in self.checkpoints
        )
        return [group for group in groups if any(_may_be_younger(record, group[0]) for record in group[1:])]

    @property
    def ahead(self) -> dict[int, float]:
        """Steps whose records claim to be younger than they are, and by how many seconds."""
        return {checkpoint.step: checkpoint.ahead for checkpoint in self.recorded if checkpoint.ahead}

    @property
    def full(self) -> tuple[Checkpoint, ...]:
        """The checkpoints from which a job can resume."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.kind == FULL)

    @property
    def folders(self) -> set[str]:
        """Folders of the checkpoints."""
        return {checkpoint.folder for checkpoint in self.checkpoints}

    def going(self) -> set[tuple[str, str]]:
        """Return (folder, id) of the checkpoints that a tombstone will delete."""
        return {stone.name for stone in self.notes.tombstones if stone.action == DELETE}

    def given_up(self) -> set[tuple[str, str]]:
        """Return (folder, id) of the checkpoints that will be deleted whatever a policy says.

        A person or a restore has given them up, or a pruner has begun to delete them.
        """
        stones = self.notes.tombstones
        return {stone.name for stone in stones if stone.action == DELETE and not stone.is_revocable}

    def spared(self, fates: Mapping[tuple[int, str], str]) -> list[Tombstone]:
        """Return the tombstones that a policy takes back. `fates` maps (step, id) to the action that it plans now."""
        revocable = [stone for stone in self.notes.tombstones if stone.is_revocable]
        void = {DELETE: (KEEP, THIN), THIN: (KEEP,)}
        return [stone for stone in revocable if fates.get((stone.step, stone.id)) in void[stone.action]]

    def without(self, tombstones: Collection[Tombstone]) -> Snapshot:
        """Return the snapshot as it is once these tombstones are taken back."""
        keys = {stone.key for stone in tombstones}
        left = tuple(stone for stone in self.notes.tombstones if stone.key not in keys)
        return replace(self, notes=replace(self.notes, tombstones=left))

    def metrics(self) -> dict[tuple[str, str], dict[str, float]]:
        """Return the metrics by checkpoint (folder, id) and name; of several values the one that was reported last."""
        steps: dict[int, list[Checkpoint]] = {}
        for checkpoint in self.checkpoints:
            steps.setdefault(checkpoint.step, []).append(checkpoint)
        metrics: dict[tuple[str, str], dict[str, float]] = {}
        for report in sorted(self.notes.reports, key=attrgetter("time", "key")):
            for checkpoint in steps.get(report.step, ()):
                # Metrics of a commit that was rolled back or replaced must not rank the one in its place.
                if report.token in (None, checkpoint.id):
                    metrics.setdefault(checkpoint.name, {})[report.name] = report.value
        return metrics

    def metric_names(self) -> frozenset[str]:
        """Return the names of all metrics with values in the run."""
        return frozenset(report.name for report in self.notes.reports)

    def held(self) -> dict[int, set[str]]:
        """Return the steps that are held at the moment, with the reasons: pinned, leased or restored from."""
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
        """The resumes since which no full checkpoint was committed, by the jobs' clocks or by the store's.

        The clock of the resuming job may be behind that of the saving job: then the store's times decide.
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
        """Return (folder, id) of the checkpoints that are never deleted.

        These are the newest full checkpoint by step and by time, and the newest of any kind by step and by time.
        Checkpoints that were given up count only if no others are left: a rollback discards the highest steps.
        """
        given_up = self.given_up()
        sets = ([one for one in some if one.name not in given_up] or some for some in (self.full, self.checkpoints))
        return {max(some, key=key).name for some in sets if some for key in (BY_STEP, _BY_TIME)}


def _may_be_younger(one: Checkpoint, youngest: Checkpoint) -> bool:
    if one.created == youngest.created:
        return True
    # `>=` and not `>`, because S3 reports whole seconds.
    return one.written is not None and youngest.written is not None and one.written >= youngest.written
