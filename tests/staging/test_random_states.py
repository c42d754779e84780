"""Whatever tensors a state has over whatever memory, its copy has the same values and sharing, in few bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from bucketpoint.staging import Stager, StagingOptions
from bucketpoint.staging.layout import lay_out
from dcp.states import flat
from staging.helpers import finished

pytestmark = pytest.mark.contract

BUFFER_BYTES = 192
DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn)
if hasattr(torch, "uint4"):
    DTYPES += (torch.uint4,)


@dataclass(frozen=True)
class View:
    """A tensor over one of the buffers, in elements of its dtype."""

    buffer: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        return buffers[self.buffer].view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    def elements(self) -> list[int]:
        return [
            self.offset + sum(at * step for at, step in zip(index, self.stride, strict=True))
            for index in itertools.product(*map(range, self.shape))
        ]

    def is_dense(self) -> bool:
        """By looking at each element, so that it shares no reasoning with what it is compared with."""
        elements = self.elements()
        return len(set(elements)) == len(elements) == max(elements) - min(elements) + 1

    def span(self) -> range:
        size = self.dtype.itemsize
        elements = self.elements()
        return range(min(elements) * size, (max(elements) + 1) * size)

    def unrepeated_nbytes(self) -> int:
        unrepeated = (size for size, step in zip(self.shape, self.stride, strict=True) if step)
        return self.dtype.itemsize * math.prod(unrepeated)


@st.composite
def views(draw: st.DrawFn, buffers: int) -> View:
    dtype = draw(st.sampled_from(DTYPES))
    room = BUFFER_BYTES // dtype.itemsize
    offset = draw(st.integers(0, room - 1))
    shape: list[int] = []
    stride: list[int] = []
    reach = offset
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, 6))
        size = draw(st.integers(0, 6))
        while size > 1 and reach + (size - 1) * step >= room:
            size -= 1
        reach += max(0, size - 1) * step
        shape.append(size)
        stride.append(step)
    if draw(st.booleans()):
        # Most tensors of a state are of this kind: a run of elements, in one order of the dimensions or another.
        shape = [size for size in shape if size][:2]
        while shape and offset + math.prod(shape) > room:
            shape.pop()
        stride = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        if draw(st.booleans()):
            shape.reverse()
            stride.reverse()
    return View(draw(st.integers(0, buffers - 1)), dtype, offset, tuple(shape), tuple(stride))


@dataclass(frozen=True)
class State:
    buffers: int
    views: list[View]
    shape: list[int]

    def tree(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Each tensor, or its view, in a place of its own kind, some in two."""
        root: dict[str, Any] = {"nested": {"deeper": {}}, "list": [0, []], "tied": {}}
        for number, (tensor, place) in enumerate(zip(tensors, self.shape, strict=True)):
            if place == 0:
                root[str(number)] = tensor
            elif place == 1:
                root["nested"]["deeper"][number] = tensor
            elif place == 2:
                root["list"][1].append((number, [tensor]))
            else:
                root[str(number)] = root["tied"][number] = tensor
        return root


@st.composite
def states(draw: st.DrawFn) -> State:
    buffers = draw(st.integers(1, 3))
    chosen = draw(st.lists(views(buffers), max_size=8))
    return State(buffers, chosen, draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen))))


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of each element, without any arithmetic: NaNs too, and dtypes that compute nothing."""
    size = tensor.dtype.itemsize
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * size
    shape, stride = (*tensor.shape, size), (*(step * size for step in tensor.stride()), 1)
    return storage.as_strided(shape, stride, first).reshape(-1).tolist()  # type: ignore[no-any-return]


def random_bytes(count: int) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (BUFFER_BYTES,), dtype=torch.uint8) for _ in range(count)]


def in_one_leaf(*views: View) -> State:
    """Tensors of one leaf at one address, of several dtypes."""
    return State(1, list(views), [2] * len(views))


ONE_LEAF = [
    in_one_leaf(View(0, torch.int16, 0, (), ()), View(0, torch.uint8, 0, (3,), (1,))),
    in_one_leaf(View(0, torch.int16, 0, (), ()), View(0, torch.uint8, 0, (2, 1), (1, 2))),
]


@settings(max_examples=200)
@example(chosen=ONE_LEAF, shared=False, beside=False)
@given(
    chosen=st.lists(states(), min_size=1, max_size=3),
    shared=st.booleans(),
    beside=st.sampled_from([False, False, False, True]),
)
def test_keeps_values_and_sharing_of_any_states_by_one_stager(chosen: list[State], shared: bool, beside: bool) -> None:
    """What it has learnt from one save must not be taken for true of the next."""
    stager = Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside))
    buffers = random_bytes(3)
    for state in (*chosen, chosen[0]):
        check_a_copy(stager, state, buffers)
        views = [view.of(buffers) for view in state.views]
        assert lay_out(views).nbytes <= _needed(state.views) + 64 * len(state.views)


def check_a_copy(stager: Stager, state: State, buffers: list[torch.Tensor]) -> None:
    tree = state.tree([view.of(buffers) for view in state.views])
    views = {path: view for path, view in flat(state.tree(state.views)).items() if isinstance(view, View)}
    sources = flat(tree)
    expected = {path: bits(sources[path]) for path in views}

    root = finished(stager.stage(tree))

    for buffer in buffers:
        buffer.bitwise_not_()
    copies = flat({key: root[key] for key in root})
    for path, view in views.items():
        copied = copies[path]
        assert (copied.dtype, copied.shape) == (view.dtype, view.shape)
        assert copied.numel() or copied.stride() == view.stride
        assert bits(copied) == expected[path]
    assert all(root[str(number)] is tied for number, tied in root["tied"].items())

    dense = [(view, copies[path]) for path, view in views.items() if copies[path].numel() and view.is_dense()]
    for (one, one_copy), (other, other_copy) in itertools.combinations(dense, 2):
        assert one_copy.stride() == one.stride
        if one_copy.untyped_storage().data_ptr() != other_copy.untyped_storage().data_ptr():
            # One of them is in a tuple, and is pickled with its own bytes only.
            continue
        between = other_copy.data_ptr() - one_copy.data_ptr()
        if one.buffer == other.buffer and _overlap(one.span(), other.span()):
            event("overlapping")
            assert between == other.span().start - one.span().start
        else:
            assert between >= one_copy.nbytes or -between >= other_copy.nbytes


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _needed(views: list[View]) -> int:
    """Bytes: what dense tensors cover together, and what each of the others shows."""
    covered: set[tuple[int, int]] = set()
    scattered: dict[View, int] = {}
    for view in views:
        if 0 in view.shape:
            continue
        if view.is_dense():
            covered.update((view.buffer, byte) for byte in view.span())
        else:
            scattered[view] = view.unrepeated_nbytes()
    return len(covered) + sum(scattered.values())
