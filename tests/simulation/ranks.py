"""One save on one rank, as DCP goes about it, and the meetings of the ranks in place of gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.simulation.oracle import OPTIM_ADDS
from tests.simulation.scheduler import Process, here
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from bucketpoint.dcp.reader import BucketReader
from bucketpoint.dcp.writer import BucketWriter

COLLECTIVE_S = 5 * 86400.0
"""After which a rank gives up waiting for the others: torch's process groups may be told to wait for days."""


class CollectiveError(Exception):
    """Another rank has failed, died, or not come."""


@dataclass
class Meeting:
    """Where the ranks of one save leave what they have for each other."""

    processes: list[Process]
    there: dict[tuple[str, int], tuple[bool, Any]] = field(default_factory=dict)
    answers: dict[str, tuple[bool, Any]] = field(default_factory=dict)
    part: int | None = None
    """The rank whose part of the state is saved, where its group has ended and it is alone."""

    def all_there(self, phase: str) -> bool:
        # Of a process that is gone the others are told at once.
        return all((phase, rank) in self.there or one.dead for rank, one in enumerate(self.processes))

    def meet(self, rank: int, phase: str, mine: Callable[[], Any], together: Callable[[list[Any]], Any]) -> Any:
        """`mine` on each rank; `together` on the first of all their results; its answer on each."""
        found = here()
        assert found is not None
        scheduler, task = found
        try:
            self.there[phase, rank] = True, mine()
        except Exception as error:  # noqa: BLE001 (raised again below, on each rank)
            self.there[phase, rank] = False, error
        if rank == 0:
            if len(self.processes) > 1 and not scheduler.wait(task, lambda: self.all_there(phase), COLLECTIVE_S):
                self.answers[phase] = False, CollectiveError(f"{phase}: a rank did not come")
                raise CollectiveError(f"{phase}: a rank did not come")
            gone = False, CollectiveError("a rank is gone")
            results = [self.there.get((phase, one), gone) for one in range(len(self.processes))]
            failed = next((value for whole, value in results if not whole), None)
            try:
                if failed is not None:
                    raise failed
                self.answers[phase] = True, together([value for _, value in results])
            except Exception as error:
                self.answers[phase] = False, error
                raise
        else:
            first = self.processes[0]
            scheduler.wait(task, lambda: phase in self.answers or first.dead, COLLECTIVE_S)
        whole, answer = self.answers.get(phase, (False, CollectiveError(f"{phase}: the coordinator did not answer")))
        if not whole:
            raise CollectiveError(f"{phase}: {answer}") from answer
        return answer


def save_on_rank(
    rank: int,
    meeting: Meeting,
    url: str,
    value: float,
    make: Callable[[], BucketWriter],
    collectives: bool,
    slow: tuple[float, bool],
    tokens: dict[int, str],
) -> None:
    """As `torch.distributed.checkpoint.state_dict_saver` goes about it."""
    found = here()
    assert found is not None
    scheduler, task = found
    writer = make()
    planner = DefaultSavePlanner()
    part = rank if meeting.part is None else meeting.part
    state = {
        "model": {f"w{part}": torch.full((3,), value)},
        "optim": {f"m{part}": torch.full((2,), value + OPTIM_ADDS)},
    }
    writer.reset(url)
    metadata: list[Any] = []

    def local_step() -> Any:
        meta = writer.storage_meta()
        tokens[rank] = str(meta.save_id)[-12:] if meta is not None else ""
        planner.set_up_planner(state_dict=state, storage_meta=meta, is_coordinator=rank == 0 or not collectives)
        writer.set_up_storage_writer(rank == 0 or not collectives, rank=rank, use_collectives=collectives)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[Any]) -> Any:
        plans, made = planner.create_global_plan(plans)
        metadata.append(made)
        return writer.prepare_global_plan(plans)

    def write_data(plan: Any) -> Any:
        if slow[0] and not slow[1]:
            scheduler.sleep(task, slow[0])
        written = writer.write_data(planner.finish_plan(plan), planner).value()
        # Another rank takes so long, or another of its objects: what is here gets old.
        if slow[0] and slow[1]:
            scheduler.sleep(task, slow[0])
        return written

    def finish(results: list[Any]) -> None:
        writer.finish(metadata=metadata[0], results=results)

    if not collectives:
        finish([write_data(global_step([local_step()])[0])])
        return
    plans = meeting.meet(rank, "plan", local_step, global_step)
    meeting.meet(rank, "write", lambda: write_data(plans[rank]), finish)


def load_on_rank(rank: int, meeting: Meeting, find: Callable[[], str]) -> list[float]:
    """As `torch.distributed.checkpoint.state_dict_loader` goes about it. Returns what all ranks have loaded."""
    reader, planner, state = BucketReader(progress=lambda _: None), DefaultLoadPlanner(), dict[str, Any]()

    def local_step() -> Any:
        reader.reset(find())
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank)
        entries = metadata.state_dict_metadata.items()
        state.update({name: torch.zeros(entry.size) for name, entry in entries if hasattr(entry, "size")})
        planner.set_up_planner(state, metadata, rank == 0)
        return reader.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[Any]) -> Any:
        return reader.prepare_global_plan(planner.create_global_plan(plans))

    def read_data() -> list[float]:
        reader.read_data(planner.finish_plan(plans[rank]), planner).wait()
        return values_in(state)

    plans = meeting.meet(rank, "plan", local_step, global_step)
    values: list[float] = meeting.meet(rank, "read", read_data, lambda each: [value for mine in each for value in mine])
    return values


def values_in(state: dict[str, Any]) -> list[float]:
    """Return the number that each element of a loaded state was made from."""
    less = {name: OPTIM_ADDS if name.startswith("optim") else 0.0 for name in state}
    return [number - less[name] for name, tensor in state.items() for number in tensor.tolist()]
