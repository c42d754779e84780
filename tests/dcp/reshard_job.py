"""Tensors laid out on the ranks of a job, and that job's save and load in one process, without collectives.

Each rank has planners, a writer and a reader of its own, called in the order in which DCP calls them. What DCP would
send from rank to rank is pickled on its way. How a rank's part is cut from the whole is computed here, not by torch.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bucketpoint import BucketWriter
from bucketpoint.dcp.planning.results import Results
from bucketpoint.dcp.planning.save_planner import SavePlanner
from bucketpoint.format.storage_info import Columns

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True)
class OnMesh:
    """A DTensor. `ranks` fill a mesh of this shape in order; the other ranks of the job hold nothing of it."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def box(self, shape: Sequence[int], rank: int) -> Box | None:
        if rank not in self.ranks:
            return None
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, at in self._order(self._coordinate(rank)):
            placement = self.placements[axis]
            if not isinstance(placement, Shard | _StridedShard):
                continue
            size, dim = sizes[placement.dim], placement.dim
            step = -(-size // self.mesh[axis])
            start = min(at * step, size)
            offsets[dim], sizes[dim] = offsets[dim] + start, min(step, size - start)
        return tuple(offsets), tuple(sizes)

    def device_mesh(self) -> DeviceMesh:
        return DeviceMesh("cpu", torch.tensor(self.ranks).reshape(self.mesh))

    def _coordinate(self, rank: int) -> list[int]:
        index, coordinate = self.ranks.index(rank), []
        for size in reversed(self.mesh):
            coordinate.insert(0, index % size)
            index //= size
        return coordinate

    def _order(self, coordinate: list[int]) -> list[tuple[int, int]]:
        """Axes in the order in which they cut: a strided one (FSDP of what TP has cut) after the others."""
        axes = list(enumerate(coordinate))
        return sorted(axes, key=lambda axis: isinstance(self.placements[axis[0]], _StridedShard))


@dataclass(frozen=True)
class Plain:
    """An ordinary tensor, the same on every rank."""

    def box(self, shape: Sequence[int], rank: int) -> Box:
        return (0,) * len(shape), tuple(shape)


@dataclass(frozen=True)
class Pieces:
    """Any boxes on any ranks, as frameworks with shardings of their own have them: rank by rank."""

    boxes: tuple[tuple[Box, ...], ...]


Layout = OnMesh | Plain | Pieces


class PiecedTensor(torch.Tensor):
    """What DCP asks of a tensor class that is sharded in a way of its own."""

    pieces: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: dict[tuple[int, ...], torch.Tensor]) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self.pieces = pieces
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), piece.size()),
                    TensorProperties.create_from_tensor(piece),
                    self.size(),
                ),
            )
            for offsets, piece in self.pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), piece.size()) for offsets, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]


def part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """A process group that sends nothing, so that meshes can be made as this rank has them."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Each group puts a hook of its own around the last one, and leaves it there.
        sys.excepthook = hook


def held(
    layout: Layout, whole: torch.Tensor, rank: int, local: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """What this rank has in its state for `whole`, and each of its parts with the elements that belong there.

    Args:
        local: makes the rank's memory from the elements that belong there; not called where a rank has none.
    """
    if isinstance(layout, Pieces):
        parts = {box[0]: part(whole, box) for box in layout.boxes[rank]}
        pieces = {offsets: local(expected) for offsets, expected in parts.items()}
        return PiecedTensor(whole.shape, next(iter(pieces.values()), whole).dtype, pieces), [
            (pieces[offsets], expected) for offsets, expected in parts.items()
        ]
    box = layout.box(whole.shape, rank)
    if box is None:
        assert isinstance(layout, OnMesh)
        return distribute_tensor(whole, layout.device_mesh(), layout.placements, src_data_rank=None), []
    expected = part(whole, box)
    mine = local(expected)
    return mine if isinstance(layout, Plain) else _distributed(layout, mine, whole), [(mine, expected)]


def _distributed(layout: OnMesh, local: torch.Tensor, whole: torch.Tensor) -> DTensor:
    mesh, stride = layout.device_mesh(), torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, layout.placements, run_check=False, shape=whole.shape, stride=stride)


class StoppedError(Exception):
    pass


class Job:
    """Some ranks in one process: DCP's calls in DCP's order, and all that crosses ranks pickled."""

    def __init__(self, world: int, make: Callable[[], Any] = SavePlanner) -> None:
        self.planners = [make() for _ in range(world)]
        self.writers: list[StorageWriter] = [BucketWriter(progress=False) for _ in range(world)]
        self.reported: list[Any] = []
        self.bytes: list[int] = []

    def save(self, states: Sequence[dict[str, Any]], url: str | None = None, *, stop: str = "") -> Metadata:
        """`stop` names what fails: "write" (on the last rank) or "finish"."""
        asked = []
        for rank, (planner, writer, state) in enumerate(zip(self.planners, self.writers, states, strict=True)):
            if url is not None:
                writer.reset(url)
            planner.set_up_planner(state, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            asked.append(writer.prepare_local_plan(planner.create_local_plan()))
        dealt, metadata = self.planners[0].create_global_plan(crossed(asked))
        dealt = crossed(self.writers[0].prepare_global_plan(dealt))
        written = []
        for rank, (planner, writer, plan) in enumerate(zip(self.planners, self.writers, dealt, strict=True)):
            final = planner.finish_plan(plan)
            if stop == "write" and rank == len(states) - 1:
                raise StoppedError
            written.append(writer.write_data(final, planner).wait())
            assert _count(written[-1]) == len(final.items)
        self.reported = crossed(written)
        self.bytes = [sum(len(pickle.dumps(each)) for each in said) for said in zip(asked, dealt, written, strict=True)]
        if stop == "finish":
            self.writers[0]._open = None  # type: ignore[attr-defined]
        self.writers[0].finish(metadata, self.reported)
        return metadata

    def in_columns(self) -> list[bool]:
        """For each rank whether the results of the last save crossed as columns."""
        return [isinstance(results, Results) and isinstance(results.content, Columns) for results in self.reported]


def _count(report: Any) -> int:
    """The number of results that a rank reports."""
    if not isinstance(report, Results):
        return len(report)
    return report.content.layout.count if isinstance(report.content, Columns) else len(report.named[0])


def crossed(values: Sequence[Any]) -> list[Any]:
    """As they arrive on another rank."""
    return [pickle.loads(pickle.dumps(value)) for value in values]


def save(
    states: Sequence[dict[str, Any]], make_writer: Callable[[], StorageWriter], make_planner: Callable[[], Any]
) -> None:
    """Save the state of every rank."""
    job = Job(len(states), make_planner)
    job.writers = [make_writer() for _ in states]
    job.save(states)


def load(
    states: Sequence[dict[str, Any]],
    make_reader: Callable[[], StorageReader],
    make_planner: Callable[[], LoadPlanner],
) -> None:
    """Load into the state of every rank."""
    readers = [make_reader() for _ in states]
    planners = [make_planner() for _ in states]
    plans = []
    for rank, (state, reader, planner) in enumerate(zip(states, readers, planners, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    dealt = readers[0].prepare_global_plan(planners[0].create_global_plan(crossed(plans)))
    for reader, planner, plan in zip(readers, planners, crossed(dealt), strict=True):
        reader.read_data(planner.finish_plan(plan), planner).wait()
