"""Check whether a save may add a step below existing ones, or replace a checkpoint of the same step."""

from __future__ import annotations

import contextlib
import time
from typing import Literal, get_args

from bucketpoint.catalog.catalog import Catalog
from bucketpoint.catalog.deletion.remove import HOLDS, Discard, rolled_back
from bucketpoint.catalog.deletion.worker import PruneWorker
from bucketpoint.catalog.records import process_name, read_record
from bucketpoint.catalog.snapshot import Checkpoint, Snapshot
from bucketpoint.errors import BucketpointError, CheckpointExistsError

Newer = Literal["error", "keep", "discard"]

_SAY_SO = "If training continues from an earlier step, call manager.restore(state, step, rollback=True):"
_OTHER_JOB = (
    "If another job saves to this run, stop it, or give this job a run with another URL: a rollback here would delete "
    "the checkpoints of that job. "
)


class Replacing:
    """Check of each save against the existing checkpoints, on the coordinator.

    After the first check, which lists the run, saves above the highest step send no request. A checkpoint that was
    given up, or has a tombstone, blocks a save only if it is pinned or leased. If it was given up because of damage, it
    never does.

    Attributes:
        rolled_back_to: step that training was rolled back to, which may be saved again until the next commit.
        beside: True if the job was restored with `fresh=True`: saves may have lower steps than existing checkpoints.
    """

    def __init__(self, catalog: Catalog, pruner: PruneWorker) -> None:
        self._catalog = catalog
        self._pruner = pruner
        self._looked = False
        self._highest: int | None = None
        self.rolled_back_to: int | None = None
        self.beside = False
        self._discards: list[Discard] = []

    def restored(self, step: int | None, *, rollback: bool = False, beside: bool = False) -> None:
        """Record that the job resumed from `step`, or from scratch (None). The next save lists the run again."""
        # A rollback stays in effect until the next commit, even if its target is restored again without `rollback`.
        self.rolled_back_to = step if rollback or step == self.rolled_back_to else None
        self._looked, self.beside = False, beside

    def failed(self) -> None:
        """Withdraw the discards of the failed save."""
        self._pruner.forget(self._discards)
        self._discards = []

    def committed(self, step: int) -> None:
        """Record a commit. Called on the thread of the save."""
        self._discards = []
        self._highest = step if self._highest is None else max(step, self._highest)
        self.rolled_back_to = None

    def allowed(self, step: int, *, overwrite: bool, newer: Newer) -> bool | frozenset[str]:
        """Return True if any checkpoint of the step may be replaced, False if none, or the marks of those that may be.

        Two LISTs, three after a rollback, and one small GET for each checkpoint without a record.

        Raises:
            CheckpointExistsError: the step is committed.
            BucketpointError: there are newer checkpoints; or `newer` is not one of its three values.
        """
        if newer not in get_args(Newer):
            raise BucketpointError(
                f"newer= must be one of {', '.join(map(repr, get_args(Newer)))}, not {newer!r}", url=self._catalog.url
            )
        if self._looked and self._highest is not None and step > self._highest:
            return overwrite
        given_up = {discard.name: discard for discard in self._pruner.given_up}
        back = given_up or self.rolled_back_to is not None
        # Only a snapshot with notes shows which checkpoints are pinned or leased.
        snapshot = self._catalog.with_unrecorded(self._catalog.snapshot() if back else self._catalog.steps())
        there = [*snapshot.checkpoints, *(discard.checkpoint for discard in given_up.values())]
        self._looked, self._highest = True, max((checkpoint.step for checkpoint in there), default=None)
        gone = snapshot.going() | given_up.keys()
        # A checkpoint without a record has no id in a snapshot, so its folder identifies it.
        folders = {discard.checkpoint.folder for discard in given_up.values() if discard.checkpoint.key is None}
        gone |= {checkpoint.name for checkpoint in snapshot.unrecorded if checkpoint.folder in folders}
        for checkpoint in snapshot.checkpoints:
            if checkpoint.step == step and not overwrite:
                self._refuse_to_replace(checkpoint, snapshot, gone)
        later = [one for one in snapshot.full if one.step > step and one.name not in gone]
        if later and newer == "error" and not self.beside:
            many = f"{len(later)} checkpoints have higher steps than {step}; the highest is"
            higher = many if len(later) > 1 else f"1 checkpoint has a higher step than {step}:"
            last = max(later, key=lambda one: one.step)
            committer, remedy = self._committer(last)
            raise BucketpointError(
                f"{higher} step {last.step}, committed {committer}; "
                f"training was probably rolled back{', or another job saves to this run' if remedy else ''}",
                url=self._catalog.url,
                remedy="If this job has not restored yet, call manager.restore(state) first. "
                f"{remedy}{_SAY_SO} the newer checkpoints get a tombstone. "
                'save(..., newer="keep") leaves them in place, as the latest',
            )
        if newer == "discard":
            discards = rolled_back(self._catalog, snapshot, step)
            self._discards = [discard for discard in discards if discard.name not in given_up]
            self._pruner.give_up(discards)
        if overwrite:
            return True
        # Marks and not True: a commit of this step by another job, made after this check, must not be replaced.
        marks = {checkpoint.mark for checkpoint in snapshot.checkpoints if checkpoint.step == step}
        marks |= {tombstone.mark for tombstone in snapshot.notes.tombstones if tombstone.step == step}
        marks |= {discard.checkpoint.mark for discard in given_up.values() if discard.checkpoint.step == step}
        return frozenset(marks) or False

    def _refuse_to_replace(self, one: Checkpoint, snapshot: Snapshot, gone: set[tuple[str, str]]) -> None:
        """Raise unless a checkpoint may be replaced without `overwrite=True`: it was given up and is not held."""
        held = sorted(snapshot.held().get(one.step, set()) & HOLDS)
        given_up = one.name in gone or one.step == self.rolled_back_to
        same = [each for each in self._pruner.given_up if each.checkpoint.folder == one.folder]
        damaged = any(each.damaged and (one.key is None or each.checkpoint.id == one.id) for each in same)
        if damaged or (given_up and not held):
            return
        replaces = "save(..., overwrite=True) replaces the checkpoint"
        committer, remedy = self._committer(one)
        status = " and ".join(["committed", *held])
        raise CheckpointExistsError(
            f"Checkpoint already exists at this URL: step {one.step} is {status}, {committer}",
            url=self._catalog.url_of_folder(one.folder),
            remedy=f"{replaces}, even if it is held"
            if given_up
            else f"{remedy}{_SAY_SO} the step may then be saved again. Or: {replaces}",
        )

    def _committer(self, one: Checkpoint) -> tuple[str, str]:
        """Return a text with time and host of a checkpoint's commit, and a remedy if another job may have made it."""
        host = None
        if one.key is not None:
            with contextlib.suppress(BucketpointError):
                record = read_record(self._catalog, one.key)
                host = record.host if record is not None else None
        when = time.strftime("at %Y-%m-%d %H:%M:%S UTC", time.gmtime(one.created))
        if host is None:
            return when, _OTHER_JOB
        name = host if host.isprintable() else repr(host)
        return f"{when} by {name}", "" if host == process_name() else _OTHER_JOB
