"""What actors do: the product's own functions, called as programs and people call them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.simulation.bucket import URL, Bucket, Refusal, View
from tests.simulation.facts import Op, Pinned
from tests.simulation.oracle import OPTIM_ADDS, Oracle
from tests.simulation.ranks import CollectiveError, Meeting, load_on_rank, save_on_rank, values_in
from tests.simulation.scheduler import KilledError, Process, Scheduler, here
from torch.distributed.checkpoint import CheckpointException

from bucketpoint.catalog import notes
from bucketpoint.catalog.catalog import Catalog, latest_checkpoint, open_catalog
from bucketpoint.catalog.deletion.prune import prune_by
from bucketpoint.catalog.deletion.state import GoneError, undo
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.deletion.worker import worker_of
from bucketpoint.catalog.records import adopt
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.convert.pipeline import ConvertOptions, plan_conversion, run_conversion
from bucketpoint.dcp.async_save import SaveHandle
from bucketpoint.dcp.copy import copy_checkpoint, plan_copy
from bucketpoint.dcp.error_boundary import as_ours
from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError, CheckpointNotFoundError, CorruptDataError, StoreError
from bucketpoint.manager import CheckpointManager
from bucketpoint.retention import RetentionPolicy
from bucketpoint.staging import SavingRanks
from bucketpoint.transfer import TransferOptions

IN_PARTS = TransferOptions(part_bytes=1 << 20, single_put_bytes=1)
WHOLE = TransferOptions()
COPYING = TransferOptions(max_inflight_bytes=1 << 20)

Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Actor:
    """A job of one rank or several, or a person with a terminal: what it does, one after the other."""

    name: str
    steps: tuple[Step, ...]
    ranks: int = 1
    skews: tuple[float, ...] = (0.0,)
    signs: bool = True
    spared: bool = False
    jumps: tuple[tuple[float, float], ...] = ()

    def with_steps(self, steps: tuple[Step, ...]) -> Actor:
        return replace(self, steps=steps)


@dataclass
class World:
    """One run of the simulation."""

    scheduler: Scheduler
    bucket: Bucket
    oracle: Oracle
    view: View
    values: int = 0
    log: list[str] = field(default_factory=list)

    def catalog(self, root: str) -> Catalog:
        return open_catalog(f"{URL}/{root}")

    def next_value(self) -> float:
        self.values += 1
        return float(self.values)


class Running:
    """An actor at work: its processes, and the writers that they keep."""

    def __init__(self, world: World, actor: Actor) -> None:
        self.world = world
        self.actor = actor
        self.managers: dict[str, CheckpointManager] = {}
        self.rolled_back_to: int | None = None
        skews = (actor.skews * actor.ranks)[: actor.ranks]
        self.processes = [
            Process(
                f"{actor.name}.{rank}" if actor.ranks > 1 else actor.name,
                skew,
                actor.jumps,
                actor.signs,
                spared=actor.spared,
            )
            for rank, skew in enumerate(skews)
        ]

    def start(self) -> None:
        self.world.scheduler.spawn(self.processes[0], self.actor.name, self.work)

    def work(self) -> None:
        for number, (kind, given) in enumerate(self.actor.steps):
            with self._judged():
                getattr(self, kind)(number, **given)
        for manager in self.managers.values():
            with contextlib.suppress(BucketpointError):
                manager.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def op(self, kind: str, text: str = "", **facts: Any) -> Iterator[Op]:
        """What is done within is `kind`; a failure that the product reports ends it, and not the actor."""
        found = here()
        assert found is not None
        _, task = found
        op = task.op = Op(kind, self.actor.name, text, asked=self.world.oracle.seq, **facts)
        try:
            yield op
            self.world.log.append(f"{op}: done")
        except (BucketpointError, CollectiveError) as error:
            self.world.log.append(f"{op}: {type(error).__name__}: {error}")
        finally:
            task.op = None

    def sleep(self, number: int, seconds: float) -> None:
        found = here()
        assert found is not None
        found[0].sleep(found[1], seconds)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(
        self,
        number: int,
        root: str,
        step: int,
        how: str = "plain",
        policy: RetentionPolicy | None = None,
        overwrite: bool = True,
        collectives: bool = True,
        parts: bool = False,
        slow: float = 0.0,
        slow_end: bool = False,
        discards: tuple[int, ...] = (),
        ended: bool = False,
    ) -> None:
        url = f"{URL}/{root}/step-{step}"
        value = self.world.next_value()
        ranks = len(self.processes)
        said = [
            f"{value:.0f}",
            how,
            *([] if collectives else ["no collectives"]),
            *(["overwrite"] if overwrite else []),
            *(["its group has ended"] if ended else []),
        ]
        text = f"{url} ({', '.join(said)})"
        parts_of = ranks if collectives else 0
        facts = {"discards": frozenset(discards), "rolled_back_to": self.rolled_back_to, "parts": parts_of}
        with self.op("save", text, overwrite=overwrite, value=value, policy=policy, **facts) as op:
            if how == "manager":
                assert policy is not None
                token = self._managed(root, step, policy, overwrite, "discard" if discards else "keep", value)
                with self._judged():
                    self.world.oracle.saved(op, [token])
                return
            meeting = Meeting(self.processes)
            make = functools.partial(self._writer, root, how, policy, overwrite, parts)
            tokens: dict[int, str] = {}

            def work(rank: int) -> None:
                slowly = (slow, slow_end)
                if ended:
                    # DCP takes each rank for the only one.
                    alone, make_alone = (
                        Meeting([self.processes[rank]], part=rank),
                        functools.partial(_ended, make, ranks),
                    )
                    save_on_rank(0, alone, url, value, make_alone, collectives, slowly, {} if rank else tokens)
                else:
                    save_on_rank(rank, meeting, url, value, make, collectives, slowly, tokens)

            self._on_all_ranks(op, work, together=collectives)
            with self._judged():
                self.world.oracle.saved(op, set(tokens.values()) if not collectives else [tokens[0]])

    def _on_all_ranks(self, op: Op, work: Callable[[int], None], *, together: bool) -> None:
        """Call `work` on each rank. Ranks that do not work `together` are waited for."""
        found = here()
        assert found is not None
        scheduler, task = found
        others = [
            scheduler.spawn(process, process.name, functools.partial(work, rank), op)
            for rank, process in enumerate(self.processes)
            if rank and not process.dead
        ]
        work(0)
        if not together and others:
            scheduler.wait(task, lambda: all(other.ended for other in others))
            if any(other.error is not None for other in others):
                raise CollectiveError("a rank failed")

    def _managed(self, root: str, step: int, policy: RetentionPolicy, overwrite: bool, newer: str, value: float) -> str:
        """Save through this process's manager of the run, and wait for it. Returns the token."""
        found = here()
        assert found is not None
        task = found[1]
        tokens: dict[int, str] = {}

        def at_once(state: Any, *, storage_writer: BucketWriter, checkpoint_id: str, **given: Any) -> SaveHandle:
            """`async_save` without the copy and the thread, which know no store."""
            handle = SaveHandle(checkpoint_id)
            try:
                alone = Meeting(self.processes[:1])
                save_on_rank(0, alone, checkpoint_id, value, lambda: storage_writer, True, (0, False), tokens)
                handle.set_result(None)
            except Exception as error:  # noqa: BLE001 (what a future holds)
                cause = error.__cause__
                handle.set_exception(cause if isinstance(cause, BucketpointError) else error)
            return handle

        task.async_save = at_once
        manager = self._manager(root, policy)
        manager.save(step, {}, overwrite=overwrite, newer=newer)
        manager.wait()
        return tokens[0]

    def _manager(self, root: str, policy: RetentionPolicy) -> CheckpointManager:
        if root not in self.managers:
            self.managers[root] = CheckpointManager(f"{URL}/{root}", policy=policy)
        return self.managers[root]

    def restore(
        self, number: int, root: str, policy: RetentionPolicy, which: str | int = "latest", rollback: bool = False
    ) -> None:
        """Go on from the newest checkpoint, or roll back to one."""
        with self.op("load", f"{root}, {which}{', rollback' if rollback else ''}") as op:
            state = {"model": {"w0": torch.zeros(3)}, "optim": {"m0": torch.zeros(2)}}
            restored = self._manager(root, policy).restore(state, which, rollback=rollback)
            self.rolled_back_to = restored.step if restored is not None and rollback else None
            if which == "latest":
                with self._judged():
                    self.world.oracle.restored(op, root, restored.step if restored is not None else -1)
            if restored is not None:
                op.text += f" -> {restored.step}"
                optim = [number - OPTIM_ADDS for number in state["optim"]["m0"].tolist()]
                with self._judged():
                    self.world.oracle.loaded(op, [*state["model"]["w0"].tolist(), *optim])

    def _writer(
        self,
        root: str,
        how: str,
        policy: RetentionPolicy | None,
        overwrite: bool,
        parts: bool,
    ) -> BucketWriter:
        log, retention = None, policy if how == "retention" else None
        if how == "log":
            catalog = self.world.catalog(root)
            log = SaveLog(catalog, pruner=worker_of(catalog, policy) if policy is not None else None)
        given = {"overwrite": overwrite, "transfer": IN_PARTS if parts else WHOLE, "progress": _silent}
        return BucketWriter.of_run(None, log, retention=retention, **given)

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """What the oracle raises ends the whole run."""
        try:
            yield
        except Exception as error:
            self.world.scheduler.stop(error)
            raise KilledError() from error

    # -- pruning and sweeping ------------------------------------------------------------------------------------------

    def prune(self, number: int, root: str, policy: RetentionPolicy) -> None:
        with self.op("prune", root, policy=policy) as op:
            done = prune_by(self.world.catalog(root), policy, holder=f"{self.actor.name}-{number}").done
            op.text += f" -> {_said(done)}"
            with self._judged():
                self.world.oracle.pruned(op, root, done.deleted, done.thinned)

    def sweep(self, number: int, root: str, older_than: float, deep: bool = False) -> None:
        with self.op("sweep", f"{root} older than {older_than:.0f} s{', deep' if deep else ''}"):
            sweep(self.world.catalog(root), older_than=older_than, deep=deep)

    # -- copies --------------------------------------------------------------------------------------------------------

    def cp(self, number: int, source: str, target: str, overwrite: bool = False) -> None:
        text = f"{source} to {target}{', overwrite' if overwrite else ''}"
        with self.op("cp", text, overwrite=overwrite):
            saved = open_checkpoint(f"{URL}/{source}")
            copy_checkpoint(plan_copy(saved, f"{URL}/{target}", overwrite=overwrite), COPYING)

    def convert(self, number: int, source: str, target: str, overwrite: bool = False) -> None:
        text = f"{source} to {target}{', overwrite' if overwrite else ''}"
        with self.op("convert", text, overwrite=overwrite):
            options = ConvertOptions(overwrite=overwrite)
            run_conversion(
                plan_conversion(f"{URL}/{source}", f"{URL}/{target}", to_format="bucketpoint", options=options)
            )

    # -- what people say -----------------------------------------------------------------------------------------------

    def adopt(self, number: int, root: str) -> None:
        with self.op("adopt", root):
            adopt(self.world.catalog(root))

    def undo(self, number: int, root: str, step: int) -> None:
        with self.op("undo", f"{root} {step}"), contextlib.suppress(GoneError):
            undo(self.world.catalog(root), step)

    def report(self, number: int, root: str, step: int, value: float) -> None:
        """An evaluator reports the loss of a step."""
        with self.op("report", f"{root} {step}: {value}"):
            notes.report(self.world.catalog(root), step, {"loss": value})

    def pin(self, number: int, root: str, step: int, seconds: float = 0.0) -> None:
        """Pin a step for good, or take the pin back after so long."""
        name = f"{self.actor.name}/{number}"
        with self.op("pin", f"{root} {step}") as op:
            catalog = self.world.catalog(root)
            made = notes.pin(catalog, step)
            self.world.oracle.pins[name] = Pinned(root, step, float("inf"), "pinned")
            if seconds:
                self.sleep(number, seconds)
                op.text += " -> unpin"
                del self.world.oracle.pins[name]
                notes.unpin(catalog, step, made)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self, number: int, root: str, step: int, seconds: int = 600) -> None:
        """Read a step under a lease."""
        name = f"{self.actor.name}/{number}"
        with self.op("load", f"{root} {step}") as op:
            catalog = self.world.catalog(root)
            # The heartbeat is no older than now, by the store's clock.
            began = self.world.scheduler.now
            notes.lease(catalog, step, name.replace("/", "-"), seconds=seconds)
            self.world.oracle.pins[name] = Pinned(root, step, began + seconds, "leased")
            before = self.world.oracle.live.get(f"{root}/step-{step}/.metadata")
            try:
                values = self._values(f"{URL}/{root}/step-{step}")
                with self._judged():
                    self.world.oracle.loaded(op, values)
            except CorruptDataError as error:
                with self._judged():
                    self.world.oracle.not_loaded(op, f"{root}/step-{step}", before, error)
                raise
            finally:
                self.world.oracle.pins.pop(name, None)
                with contextlib.suppress(StoreError):
                    notes.release(catalog, step, name.replace("/", "-"))

    def load_together(self, number: int, root: str, step: int | None = None) -> None:
        """Read a step, or what each rank takes for the newest one, on all ranks."""
        with self.op("load", f"{root} {step or 'the newest'} on {len(self.processes)} ranks") as op:
            meeting, values = Meeting(self.processes), list[float]()

            def find() -> str:
                newest = f"{URL}/{root}/step-{step}" if step else latest_checkpoint(f"{URL}/{root}")
                if newest is None:
                    raise CheckpointNotFoundError("there is none")
                return newest

            self._on_all_ranks(op, lambda rank: values.extend(load_on_rank(rank, meeting, find)), together=True)
            with self._judged():
                self.world.oracle.loaded(op, values)

    @staticmethod
    def _values(url: str) -> list[float]:
        """All that a checkpoint holds, through the reader that loads use."""
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        reader = BucketReader(url, progress=_silent)
        metadata = reader.read_metadata()
        state = {
            name: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        try:
            _load_state_dict(state, storage_reader=reader, no_dist=True)
        except CheckpointException as raised:
            error = as_ours(raised, url, "The load")
            raise error from raised
        return values_in(state)

    # -- by hand -------------------------------------------------------------------------------------------------------

    def remove(self, number: int, root: str, step: int, only: str = "") -> None:
        """A person, or a lifecycle rule, deletes a checkpoint's folder, or one object there."""
        with self.op("person", f"deletes {root} {step}"):
            view = self.world.view
            view.delete([info.key for info in view.list(f"{root}/step-{step}/{only}")])

    def refuse(self, number: int, prefix: str, seconds: float, status: int, code: str) -> None:
        """A lifecycle rule archives objects, somebody changes their rights, or the store is overloaded: for a while."""
        bucket = self.world.bucket
        bucket.refusals.append(Refusal(prefix, bucket.clock() + seconds, status, code))

    def plant(self, number: int, key: str) -> None:
        """Somebody puts a file of their own into a checkpoint's folder."""
        with self.op("plant", key):
            self.world.view.put(key, [memoryview(b"not yours")])
            self.world.oracle.planted.add(key)


def _ended(make: Callable[[], BucketWriter], ranks: int) -> BucketWriter:
    """Make the writer of a rank whose state was staged by one of several, and whose process group has ended since."""
    writer = make()
    writer._ranks = lambda: SavingRanks(ranks)  # type: ignore[method-assign]
    return writer


def _silent(progress: Any) -> None:
    pass


def _said(done: Any) -> str:
    parts = {name: getattr(done, name) for name in ("stopped", "buried", "deleted", "thinned", "withdrawn", "refused")}
    return "; ".join(f"{name} {value}" for name, value in parts.items() if value) or "nothing"
