"""Trainers, evaluators and three pruners in any order, any of them killed or failing at any request."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bucketpoint.catalog.deletion.fence import MIN_SWEEP_AGE_S
from bucketpoint.catalog.deletion.lock import LOCK_SECONDS
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.catalog.deletion.state import GoneError, undo
from bucketpoint.catalog.deletion.sweep import SAFETY_AGE_S, sweep
from bucketpoint.catalog.notes import lease, pin, report, unpin
from bucketpoint.errors import TransientStoreError
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.retention import Entry
from bucketpoint.retention.rows import ORDER, Row
from catalog.memory import Fault, KilledError, MemoryStore, memory_catalog, order, save

faults = st.none() | st.builds(Fault, st.integers(1, 30), st.booleans(), st.booleans())
actors = st.sampled_from(["trainer", "cron", "laptop"])
known_steps = st.integers(1, 5).map(lambda number: 100 * number)
moments = st.integers(1, 25)


class Run(RuleBasedStateMachine):
    """What is true of the store after each step of anybody: it is asked directly, not through the catalog."""

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore()
        self.catalog = memory_catalog(self.store)
        self.newest = 0
        self.saves = 0
        self.pinned: set[int] = set()
        self.leased: dict[int, float] = {}
        self.other = memory_catalog(self.store, "other-{step}")
        save(self.other, 100, token="0" * 12)
        self.foreign = {key for key in self.store.objects if "other-" in key} | {"run/backup-of-step-100/x"}
        self.store.objects["run/backup-of-step-100/x"] = (b"x", "e", 0.0)

    # -- what is there -----------------------------------------------------------------------------------------------

    def committed(self) -> dict[int, str]:
        """The kind of each checkpoint, by step."""
        found = {}
        for key, (data, _, _) in self.store.objects.items():
            if key.startswith("run/step-") and key.endswith("/.metadata"):
                found[int(key.split("/")[1][5:])] = content(data)[0]
        return found

    def whole(self, step: int) -> bool:
        entry = self.store.objects.get(f"run/step-{step}/.metadata")
        if entry is None:
            return False
        _, paths = content(entry[0])
        return bool(paths) and all(f"run/step-{step}/{path}" in self.store.objects for path in paths)

    def act(self, fault: Fault | None, what: Callable[[], Any]) -> bool:
        """True if nothing went wrong. A fault is used once, so that one object serves each example anew."""
        self.store.fault = Fault(fault.at, fault.acts, fault.kills) if fault is not None else None
        try:
            what()
            return True
        except (KilledError, TransientStoreError, GoneError):
            return False
        finally:
            self.store.fault = None
            full = [step for step, kind in self.committed().items() if kind == "full"]
            self.newest = max([self.newest, *full])

    def saved(self, step: int, clock: int = 0) -> None:
        """By a job whose clock is so far ahead. Tokens are as unordered as a writer's, but the same in each run."""
        self.saves += 1
        token = f"{40503 * self.saves % 65536:04x}{self.saves:08x}"
        save(replace(self.catalog, clock=lambda: self.store.now + clock), step, token=token)

    # -- what anybody does -------------------------------------------------------------------------------------------

    @rule(step=known_steps, fault=faults, tick=st.integers(0, 100), clock=st.integers(-100, 100))
    def a_trainer_saves(self, step: int, fault: Fault | None, tick: int, clock: int) -> None:
        self.store.now += tick
        self.act(fault, lambda: self.saved(step, clock))

    @rule(fault=faults)
    def a_trainer_saves_the_next_step(self, fault: Fault | None) -> None:
        self.store.now += 60
        self.act(fault, lambda: self.saved(self.newest + 100))

    @rule(actor=actors, keep=st.integers(0, 3), thin=st.booleans(), grace=st.sampled_from([0.0, 3600.0]), fault=faults)
    def somebody_prunes(self, actor: str, keep: int, thin: bool, grace: float, fault: Fault | None) -> None:
        self.act(fault, lambda: prune(self.catalog, _policy(keep, thin), grace=grace, holder=actor))

    @precondition(lambda self: len(self.committed()) > 1)
    @rule(actor=actors, keep=st.integers(0, 1), at=moments, which=st.integers(0, 2), what=st.integers(0, 4))
    def somebody_prunes_while_others_go_on(self, actor: str, keep: int, at: int, which: int, what: int) -> None:
        steps = sorted(self.committed())
        step = steps[which % len(steps)]
        self.store.objects.pop(self.catalog.own_key("pruner.json"), None)
        count = 0

        def meanwhile(number: int, name: str) -> None:
            nonlocal count
            count += 1
            if count == at:
                self.someone_else(what, step)

        self.store.between = meanwhile
        try:
            self.act(None, lambda: prune(self.catalog, _policy(keep, False), grace=0.0, holder=actor))
        finally:
            self.store.between = None

    def someone_else(self, what: int, step: int) -> None:
        with contextlib.suppress(GoneError):
            if what == 0:
                self.saved(step)
            elif what == 1:
                self.pins(step)
            elif what == 2:
                self.leases(step)
            elif what == 3:
                self.store.objects.pop(self.catalog.own_key("pruner.json"), None)
                prune(self.catalog, _policy(1, False), grace=0.0, holder="another")
            else:
                self.undoes(step)

    def pins(self, step: int) -> None:
        pin(self.catalog, step)
        # One that comes when all is gone holds nothing.
        if step in self.committed():
            self.pinned.add(step)

    def leases(self, step: int) -> None:
        lease(self.catalog, step, "eval", seconds=1000)
        if step in self.committed():
            self.leased[step] = self.store.now + 1000

    def undoes(self, step: int) -> None:
        there = any(row.step == step for row in self.catalog.snapshot().rows())
        if undo(self.catalog, step) and not there:
            assert self.whole(step)

    @rule(step=known_steps, fault=faults)
    def somebody_pins(self, step: int, fault: Fault | None) -> None:
        before = step in self.committed()
        if self.act(fault, lambda: pin(self.catalog, step)) and before:
            self.pinned.add(step)

    @rule(step=known_steps)
    def somebody_unpins(self, step: int) -> None:
        self.pinned.discard(step)
        unpin(self.catalog, step)

    @rule(step=known_steps)
    def an_evaluator_takes_a_lease(self, step: int) -> None:
        with contextlib.suppress(GoneError):
            self.leases(step)

    @rule(step=known_steps)
    def somebody_undoes(self, step: int) -> None:
        with contextlib.suppress(GoneError):
            self.undoes(step)

    @rule(step=known_steps, value=st.floats(), fault=faults)
    def an_evaluator_reports(self, step: int, value: float, fault: Fault | None) -> None:
        if self.act(fault, lambda: report(self.catalog, step, {"loss": value})):
            snapshot = self.catalog.snapshot()
            metrics = snapshot.metrics()
            there = [one for one in snapshot.checkpoints if one.step == step and one.name not in snapshot.given_up()]
            assert all(repr(metrics[one.name]["loss"]) == repr(value) for one in there)
        self.store.now += 1

    @rule(fault=faults, deep=st.booleans(), age=st.sampled_from([MIN_SWEEP_AGE_S, SAFETY_AGE_S]))
    def somebody_sweeps(self, fault: Fault | None, deep: bool, age: float) -> None:
        self.act(fault, lambda: sweep(self.catalog, older_than=age, deep=deep))

    @rule(seconds=st.sampled_from([1.0, LOCK_SECONDS, 4000.0, SAFETY_AGE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.store.now += seconds

    # -- what holds at every moment ----------------------------------------------------------------------------------

    @invariant()
    def the_newest_full_checkpoint_that_was_ever_committed_is_restored(self) -> None:
        if not self.newest:
            return
        found = next(one for one in self.catalog.candidates() if self.whole(one.step))
        assert found.step == self.newest

    @invariant()
    def whatever_is_committed_is_whole(self) -> None:
        for step in self.committed():
            assert self.whole(step)

    @invariant()
    def what_is_pinned_or_leased_is_there(self) -> None:
        held = self.pinned | {step for step, until in self.leased.items() if self.store.now <= until}
        for step in held:
            assert self.whole(step)

    @invariant()
    def other_runs_and_other_names_are_untouched(self) -> None:
        assert self.foreign <= set(self.store.objects)

    @precondition(lambda self: bool(self.newest))
    @rule()
    def in_the_end_one_prune_and_one_sweep_leave_nothing_behind(self) -> None:
        self.store.now += SAFETY_AGE_S + LOCK_SECONDS
        for _ in range(2):
            prune(self.catalog, _policy(1, False), grace=0.0, holder="last")
        sweep(self.catalog, older_than=MIN_SWEEP_AGE_S, deep=True)
        assert self.catalog.snapshot().notes.tombstones == ()
        named = {"run/backup-of-step-100/x"}
        for step in self.committed():
            _, paths = content(self.store.objects[f"run/step-{step}/.metadata"][0])
            named |= {f"run/step-{step}/{path}" for path in paths}
            named.add(f"run/step-{step}/.metadata")
        mine = {key for key in self.store.objects if "_bucketpoint" not in key and "other-" not in key}
        assert mine == named
        steps = {row.step for row in self.catalog.snapshot().rows()}
        assert steps == set(self.committed())


@functools.lru_cache(maxsize=100)
def content(data: bytes) -> tuple[str, tuple[str, ...]]:
    """The kind of a checkpoint and the objects that it names, of its metadata."""
    metadata = decode_metadata(data)
    paths = tuple(info.relative_path for info in (metadata.storage_data or {}).values())
    return vars(metadata)["bucketpoint"]["kind"], paths


def _policy(keep: int, thin: bool) -> Callable[[Sequence[Row]], list[Entry]]:
    def decide(rows: Sequence[Row]) -> list[Entry]:
        ranked = sorted(rows, key=attrgetter(*ORDER))
        going, kept = ranked[: len(rows) - keep], ranked[len(rows) - keep :]
        orders = [order(row.step, row.id, "thin" if thin and row.kind == "full" else "delete") for row in going]
        return [*orders, *(order(row.step, row.id, "keep") for row in kept)]

    return decide


TestAnyOrder = Run.TestCase
TestAnyOrder.settings = settings(
    max_examples=500, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
