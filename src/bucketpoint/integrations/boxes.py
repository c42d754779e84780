"""Boxes of saved tensors: loads into the caller's tensors, and the geometry of strided views.

Several loads read the same commit. The geometry: the box that a view covers, and overlaps of views in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.dcp.error_boundary import errors_of_dcp
from bucketpoint.dcp.planning.load_planner import LoadPlanner
from bucketpoint.dcp.planning.local_chunks import LocalChunks
from bucketpoint.dcp.process_groups import ranks_of
from bucketpoint.dcp.reader import BucketReader


@dataclass(frozen=True)
class SavedBox:
    """A box of a saved tensor, at `offsets` and of the shape of `target`, the tensor to read the box into."""

    key: str
    offsets: tuple[int, ...]
    target: torch.Tensor


class BoxReader(BucketReader):
    """Reader of boxes that reads the metadata only once, so that all its loads read the same commit.

    After another job has replaced or deleted the checkpoint, a load raises an error.
    """

    _first: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata at the first call, as `BucketReader` does, and return the same object at later calls."""
        if self._first is None:
            metadata: Metadata = super().read_metadata(*args, **kwargs)
            if self._load.commit is not None:
                self._first = metadata, self._load.commit
            return metadata
        self._load.in_load = False
        if self._cooperation is not None:
            self._cooperation.connect(self.url)
        self._load.commit = self._first[1]
        return cast(Metadata, self._first[0])

    def load(
        self,
        boxes: Iterable[SavedBox],
        metadata: Metadata,
        *,
        process_group: Any = None,
        alone: bool = False,
        failure: BaseException | None = None,
    ) -> None:
        """Read the boxes into their targets, in no defined order.

        Args:
            alone: make no collective call. Otherwise all ranks of the group call `load` together.
            failure: error of this rank, with which the load fails on all ranks before anything is read.
        """
        reader = self
        if alone:
            reader = copy.copy(self)
            reader._cooperation = None
        state, copies = _state_of(boxes, metadata)
        # Engines set a default device while they build a model, by a function mode. Without function modes the calls
        # below ignore that device, and are faster.
        with (
            torch._C.DisableTorchFunction(),
            errors_of_dcp(self.url, "The load", ranks_of(process_group) if not alone else ()),
        ):
            dcp.load(
                state,
                storage_reader=reader,
                planner=_BoxPlanner(failure),
                process_group=process_group,
                no_dist=alone,
            )
            # Targets may come from the inference mode, which also leaves out gradients.
            with torch.inference_mode():
                for target, source in copies:
                    target.copy_(source)


class _BoxPlanner(LoadPlanner):
    """Load planner for boxes, which accepts saved keys that are not loaded."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._failure = failure

    def create_local_plan(self) -> LoadPlan:
        if self._failure is not None:
            raise self._failure
        return super().create_local_plan()

    def _compare(self, plans: list[LoadPlan]) -> None:
        """Do nothing: boxes of a few keys are a complete load."""


def _state_of(
    boxes: Iterable[SavedBox], metadata: Metadata
) -> tuple[dict[str, LocalChunks], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the state to load into, and the copies to make after the load: a box is read once for each dtype."""
    read: dict[Any, torch.Tensor] = {}
    targets: dict[str, list[SavedBox]] = {}
    copies = []
    for box in boxes:
        source = read.setdefault((box.key, box.offsets, box.target.shape, box.target.dtype), box.target)
        if source is box.target:
            targets.setdefault(box.key, []).append(box)
        else:
            copies.append((box.target, source))
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    return {key: _chunks(entries[key].size, own) for key, own in targets.items()}, copies


def _chunks(shape: Iterable[int], boxes: list[SavedBox]) -> LocalChunks:
    return LocalChunks(
        [box.target for box in boxes],
        tuple(shape),
        [box.offsets for box in boxes],
        [(0,) * len(box.offsets) for box in boxes],
        [tuple(box.target.shape) for box in boxes],
    )


# -- boxes that views cover --------------------------------------------------------------------------------------------


def box_of(key: str, whole: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> SavedBox | None:
    """Return the box of the saved tensor `key` that a view covers, with the target's axes in the saved order.

    None if the view is no box: it repeats elements, leaves some out, or ends within a row. `source` is the view of
    `whole`, a contiguous tensor of the saved shape; `target` is the tensor to read into, of the view's shape.
    """
    shape, steps, left = whole.shape, whole.stride(), int(source.storage_offset())
    offsets = []
    for step in steps:
        at, left = divmod(left, step)
        offsets.append(at)
    lengths, strides = [1] * len(shape), [1] * len(shape)
    axes = [axis for axis in reversed(range(len(shape))) if shape[axis] > 1]
    for size, step, stride in _joined_axes(source, target):
        below = [axis for axis in axes if steps[axis] >= step]
        if not below or steps[below[0]] != step:
            return None
        for axis in below:
            if size == 1:
                break
            fits = offsets[axis] + size <= shape[axis]
            part = size if fits else shape[axis]
            if lengths[axis] != 1 or (not fits and (offsets[axis] or size % part)):
                return None
            lengths[axis], strides[axis] = part, stride
            size, stride = size // part, stride * part
        if size > 1:
            return None
    return SavedBox(key, tuple(offsets), target.as_strided(lengths, strides, target.storage_offset()))


def is_plain_view(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return True if the elements of a view are elements of the whole tensor, with unchanged values."""
    same = view.untyped_storage()._cdata == whole.untyped_storage()._cdata
    inside = int(view.storage_offset()) + _reach(view) <= whole.numel() or not view.numel()
    return same and inside and view.dtype == whole.dtype and not view.is_conj() and not view.is_neg()


def _joined_axes(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return size, source stride and target stride of each axis, the largest source stride first.

    Axes that form one axis in both tensors are joined.
    """
    rows = zip(source.shape, source.stride(), target.stride(), strict=True)
    joined: list[tuple[int, int, int]] = []
    for size, step, stride in sorted((row for row in rows if row[0] != 1), key=lambda row: -row[1]):
        if joined and joined[-1][1:] == (step * size, stride * size):
            joined[-1] = (joined[-1][0] * size, step, stride)
        else:
            joined.append((size, step, stride))
    return joined


# -- memory ------------------------------------------------------------------------------------------------------------

_CELL = 2 << 20
"""Bytes in a cell of addresses of `Regions`: a large tensor has few cells, and a cell has few small tensors."""


class Regions:
    """Values by region of memory. Regions are found by address, because two storages may share memory."""

    def __init__(self) -> None:
        self._cells: dict[tuple[torch.device, int], list[tuple[int, int, Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def add(self, tensor: torch.Tensor, value: Any, *, whole: bool = False) -> None:
        """Add a value for the memory that a tensor spans; with `whole`, for the whole storage."""
        start, stop = _ends(tensor, whole)
        for cell in range(start // _CELL, -(-stop // _CELL)):
            self._cells.setdefault((tensor.device, cell), []).append((start, stop, value))

    def find(self, tensor: torch.Tensor, *, whole: bool = False) -> Iterator[Any]:
        """Yield the values of regions that overlap the tensor's, some of them several times."""
        start, stop = _ends(tensor, whole)
        for cell in range(start // _CELL, -(-stop // _CELL)):
            for low, high, value in self._cells.get((tensor.device, cell), ()):
                if low < stop and start < high:
                    yield value

    def clear(self) -> None:
        self._cells.clear()


def _ends(tensor: torch.Tensor, whole: bool) -> tuple[int, int]:
    if whole:
        memory = tensor.untyped_storage()
        return memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    return _span(tensor) if tensor.numel() else (0, 0)


# -- copies that overlap ----------------------------------------------------------------------------------------------


def in_rounds(boxes: Sequence[SavedBox]) -> list[list[SavedBox]]:
    """Group boxes, given in the order of their copies, into successive loads: no two boxes of a load overlap.

    Of two boxes that overlap, the later one is in a later load, or replaces the earlier one if the targets are the
    same. The last group may be empty.
    """
    targets = [box.target for box in boxes]
    later: dict[int, list[int]] = {}
    hidden: set[int] = set()
    spans = []
    for number, target in enumerate(targets):
        spans.append((str(target.device), *_span(target), number))
    active: list[tuple[str, int, int, int]] = []
    for span in sorted(spans):
        active = [other for other in active if other[0] == span[0] and other[2] > span[1]]
        for other in active:
            first, second = sorted((other[3], span[3]))
            if _same(targets[first], targets[second]):
                hidden.add(first)
            elif overlap(targets[first], targets[second]):
                later.setdefault(first, []).append(second)
        active.append(span)
    rounds: dict[int, list[SavedBox]] = {0: []}
    depth = [0] * len(targets)
    for number in reversed(range(len(targets))):
        depth[number] = max((depth[other] + 1 for other in later.get(number, ())), default=0)
        if number not in hidden:
            rounds.setdefault(depth[number], []).append(boxes[number])
    return [rounds[depth] for depth in sorted(rounds, reverse=True)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    views = [(view.data_ptr(), view.dtype, view.shape, view.stride()) for view in (one, other)]
    return views[0] == views[1]


def _span(view: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a view that is not empty, and of the byte after its last."""
    return view.data_ptr(), view.data_ptr() + _reach(view) * view.element_size()


def _reach(view: torch.Tensor) -> int:
    """Return the number of elements of memory from the first to the last of a view that is not empty."""
    return sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return False if two views of one memory share no byte. True may be wrong for irregular strides."""
    if not one.numel() or not other.numel():
        return False
    (start, stop), (low, high) = _span(one), _span(other)
    if stop <= low or high <= start:
        return False
    itemsize = one.element_size()
    # Axes along which the address changes. Along an expanded axis, of stride 0, it does not.
    axes = [
        [(step, size) for size, step in zip(view.shape, view.stride(), strict=True) if size > 1 and step]
        for view in (one, other)
    ]
    sizes = [dict(rows) for rows in axes]
    steps = sorted({1, *sizes[0], *sizes[1]}, reverse=True)
    nested = not any(step % below for step, below in pairwise(steps))
    if other.element_size() != itemsize or not nested:
        return True
    # In a grid with these steps every address is a cell, and a view is a box unless it extends past the end of a row.
    begin = min(one.data_ptr(), other.data_ptr())
    boxes = []
    for view, rows, size in zip((one, other), axes, sizes, strict=True):
        at, odd = divmod(view.data_ptr() - begin, itemsize)
        if odd or len(size) != len(rows):
            return True
        box = []
        for place, step in enumerate(steps):
            low, at = divmod(at, step)
            box.append((low, low + size.get(step, 1)))
            if place and box[-1][1] * step > steps[place - 1]:
                return True
        boxes.append(box)
    return all(low < stop and start < high for (low, high), (start, stop) in zip(*boxes, strict=True))
