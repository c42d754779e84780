"""Programs that slice and copy promised tensors get the values that they would get from real ones."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bucketpoint.integrations.boxes import SavedBox
from bucketpoint.integrations.promised import Promised, Promises


class Memory:
    """Saved tensors in memory, and the boxes that were read of them, one list for each load."""

    def __init__(self, **saved: torch.Tensor) -> None:
        self.saved = saved
        self.loads: list[list[SavedBox]] = []
        self.failure: BaseException | None = None
        self.promises = Promises(self.load)

    def load(self, boxes: Sequence[SavedBox], *, last: bool = False, failure: BaseException | None = None) -> None:
        self.loads.append(list(boxes))
        self.failure = failure
        # Backwards: the order within one load is not defined.
        for box in reversed(boxes):
            view = self.saved[box.key]
            for axis, (at, size) in enumerate(zip(box.offsets, box.target.shape, strict=True)):
                view = view.narrow(axis, at, size)
            with torch.no_grad():
                box.target.copy_(view)

    def __getitem__(self, key: str) -> Any:
        return self.promises.promise(key, self.saved[key].shape, self.saved[key].dtype)

    @property
    def keys(self) -> list[list[str]]:
        return [[box.key for box in boxes] for boxes in self.loads]


def counting(*shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def view_of(tensor: Any, rng: random.Random) -> Any:
    """Apply a random operation, the same one for the same seed and shape."""
    axis = rng.randrange(tensor.dim()) if tensor.dim() else 0
    size = tensor.shape[axis] if tensor.dim() else 1
    low = rng.randrange(size)
    length, part = rng.randint(1, size - low), rng.randint(1, size)
    along: list[Callable[[], Any]] = [
        lambda: tensor.narrow(axis, low, length),
        lambda: tensor.select(axis, low),
        lambda: tensor.split(part, dim=axis)[-1],
        lambda: tensor.chunk(part, dim=axis)[0],
        lambda: tensor.unbind(axis)[low],
        lambda: tensor.transpose(0, axis),
        lambda: tensor[low:] if axis == 0 else tensor[:, low:] if axis == 1 else tensor,
        lambda: tensor[..., ::2],
        lambda: tensor.flip(axis),
        lambda: tensor.view(-1)[low:],
        lambda: tensor.T.contiguous() if tensor.dim() == 2 else tensor,
        lambda: tensor.unflatten(axis, (1, -1)),
    ]
    anywhere: list[Callable[[], Any]] = [
        lambda: tensor.unsqueeze(0),
        lambda: tensor.squeeze(),
        lambda: tensor.reshape(-1),
        lambda: tensor.flatten(),
        lambda: tensor.expand(2, *tensor.shape),
        lambda: tensor.contiguous(),
        lambda: tensor.to("cpu", copy=True),
        lambda: tensor.clone(),
        lambda: tensor.detach(),
        lambda: tensor.as_strided((min(2, tensor.numel()),), (1,), 0),
        lambda: tensor.view(torch.int32).view(torch.float32),
        lambda: tensor.to(torch.float64),
        lambda: tensor * 3,
        lambda: torch.stack([tensor, tensor]),
    ]
    try:
        return rng.choice([*along, *anywhere] if tensor.dim() else anywhere)()
    except RuntimeError:
        # A view that this layout does not allow. Promised and real tensors must agree on it.
        return tensor.unsqueeze(0)


def views_of(tensor: Any, rng: random.Random) -> Any:
    for _ in range(rng.randrange(5)):
        tensor = view_of(tensor, rng)
    return tensor


def target_of(shape: torch.Size, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory and a view of it with this shape: whole, turned, within a larger tensor, of another dtype."""
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    larger = [size + rng.randrange(3) for size in shape]
    order = rng.sample(range(len(shape)), len(shape))
    memory = torch.full([larger[axis] for axis in order], -1.0, dtype=dtype)
    view = memory.permute([order.index(axis) for axis in range(len(shape))]) if shape else memory
    for axis, size in enumerate(shape):
        view = view.narrow(axis, rng.randint(0, larger[axis] - size), size)
    return memory, view


def program(tensors: Sequence[Any], rng: random.Random) -> list[Any]:
    """Copy views of the tensors into memory, in part over each other and over what was computed; return all results."""
    results: list[Any] = []
    for _ in range(rng.randint(1, 5)):
        view = views_of(rng.choice(tensors), rng)
        memory, target = target_of(view.shape, rng)
        results.append(memory)
        for _ in range(rng.randint(1, 3)):
            step = rng.randrange(8)
            if step == 0 and view.dim():
                low = rng.randrange(view.shape[0])
                target[low:] = view[low:]
            elif step == 1 and view.dim():
                low = rng.randrange(view.shape[-1])
                target[..., low:].copy_(view[..., : view.shape[-1] - low])
            elif step == 2:
                target.mul_(2)
            elif step == 3:
                results.append(memory.sum().item())
            elif step == 4:
                target.copy_(torch.ones(view.shape))
            elif step == 5:
                torch.nn.Parameter(target).data.copy_(view)
            elif step == 6:
                memory.view(-1)[rng.randrange(memory.numel()) :].mul_(2)
            else:
                target.copy_(view)
    return results


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_returns_the_results_of_real_tensors(seed: int) -> None:
    rng = random.Random(seed)
    # Two of one shape: values of the wrong tensor would show.
    shape = [rng.randint(1, 5) for _ in range(rng.randrange(4))]
    memory = Memory(one=counting(*shape), two=counting(*shape, start=1001), other=counting(4, 6, start=2001))
    real = program([tensor.clone() for tensor in memory.saved.values()], random.Random(seed))
    with memory.promises.noting():
        promised = program([memory[key] for key in memory.saved], random.Random(seed))
    for expected, result in zip(real, promised, strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, result)
        else:
            assert expected == result


def test_reads_slices_as_loaders_make_them_in_one_load_of_their_boxes() -> None:
    memory = Memory(qkv=counting(12, 8), out=counting(8, 12), norm=counting(8), scale=counting(), embed=counting(10, 8))
    fused, rows, norm, scale, padded = (torch.zeros(s) for s in ((6, 8), (8, 6), (8,), (1,), (16, 8)))
    with memory.promises.noting():
        q, k, v = memory["qkv"].chunk(3)
        for at, part in ((0, q), (2, k), (4, v)):
            fused.data.narrow(0, at, 2).copy_(part.narrow(0, 2, 2))
        rows.data.copy_(memory["out"].narrow(1, 6, 6))
        torch.nn.Parameter(norm).data[:] = memory["norm"].to("cpu").contiguous()
        scale.data[0] = memory["scale"]
        padded[:10].data.copy_(memory["embed"])
        assert not memory.loads
    assert len(memory.loads) == 1
    assert sum(box.target.numel() for box in memory.loads[0]) == 48 + 48 + 8 + 1 + 80
    assert torch.equal(fused, torch.cat([memory.saved["qkv"][at : at + 2] for at in (2, 6, 10)]))
    assert torch.equal(rows, memory.saved["out"][:, 6:])
    assert torch.equal(padded[:10], memory.saved["embed"])
    assert not padded[10:].any()
    assert scale.item() == 1


def test_keeps_views_unread_in_inference_mode() -> None:
    memory, target, whole = Memory(w=counting(6, 4)), torch.zeros(2, 3), torch.zeros(6, 4)
    with torch.inference_mode(), memory.promises.noting():
        whole.copy_(memory["w"].reshape(6, 4).contiguous())
        target.copy_(memory["w"].t().narrow(0, 1, 2).chunk(2, dim=1)[1])
        assert not memory.loads
    assert torch.equal(target, memory.saved["w"].t()[1:3, 3:])
    assert torch.equal(whole, memory.saved["w"])


def test_leaves_noted_copies_when_other_elements_are_touched() -> None:
    """Loaders fill the rows that pad a vocabulary after the copy of the others."""
    memory, padded = Memory(w=counting(5, 4)), torch.full((8, 4), -1.0)
    columns = torch.full((5, 4), -1.0)
    with memory.promises.noting():
        padded[:5].data.copy_(memory["w"])
        padded[5:].data.fill_(0)
        padded[8:].data.fill_(0)
        columns[:, :2].copy_(memory["w"][:, 2:])
        columns[:, 2:] += 1
        assert not memory.loads
    assert torch.equal(padded, torch.cat([memory.saved["w"], torch.zeros(3, 4)]))
    assert torch.equal(columns, torch.cat([memory.saved["w"][:, 2:], torch.zeros(5, 2)], 1))


def test_reads_a_tensor_at_once_for_an_operation_that_is_no_view() -> None:
    memory, parameter = Memory(a=counting(4), b=counting(4, start=9)), torch.zeros(4)
    with memory.promises.noting():
        promise = memory["a"]
        parameter.copy_(memory["b"])
        assert promise.max().item() == 4
        assert memory.keys == [["a"]]
        assert promise.numpy().tolist() == promise.tolist() == [1, 2, 3, 4]
        promise[1:].mul_(10)
        other = torch.zeros(4)
        other.copy_(promise)
        third = torch.nn.Parameter(torch.zeros(4))
        third.data = memory["b"]
        assert type(third.data) is torch.Tensor
    assert other.tolist() == [1, 20, 30, 40]
    assert parameter.tolist() == third.tolist() == [9, 10, 11, 12]


def test_copies_to_a_device_are_promises_that_later_writes_do_not_reach() -> None:
    memory, before, after = Memory(w=counting(2, 2)), torch.zeros(2, 2), torch.zeros(2, 2)
    with memory.promises.noting():
        there = memory["w"].to("cpu", copy=True)
        assert isinstance(there, Promised)
        duplicate = there.clone()
        there.add_(1)
        before.copy_(duplicate)
        after.copy_(there)
    assert torch.equal(before, memory.saved["w"])
    assert torch.equal(after, memory.saved["w"] + 1)


def test_keeps_the_later_of_two_copies_into_one_memory() -> None:
    memory = Memory(a=counting(4, 4), b=counting(4, 4, start=101), c=counting(4, 2, start=201))
    parameter, columns = torch.zeros(4, 4), torch.zeros(4, 4)
    with memory.promises.noting():
        parameter.copy_(memory["a"])
        parameter.copy_(memory["b"])
        parameter[:, 1:3].copy_(memory["c"])
        columns[:, 2:].copy_(memory["c"])
        columns[:, :2].copy_(memory["a"][:, 1:3])
    # `a` was overwritten as a whole, and is not read; columns beside each other need no load of their own.
    assert [sorted(keys) for keys in memory.keys] == [["b"], ["a", "c", "c"]]
    assert torch.equal(parameter[:, 1:3], memory.saved["c"])
    assert torch.equal(parameter[:, ::3], memory.saved["b"][:, ::3])
    assert torch.equal(columns, torch.cat([memory.saved["a"][:, 1:3], memory.saved["c"]], 1))


def test_reads_at_once_on_other_threads_and_after_the_block() -> None:
    memory, parameter, late = Memory(w=counting(3)), torch.zeros(3), torch.zeros(3)
    with memory.promises.noting():
        promise = memory["w"]
        thread = threading.Thread(target=lambda: parameter.copy_(promise))
        thread.start()
        thread.join()
        assert parameter.tolist() == [1, 2, 3]
    late.copy_(memory["w"])
    assert late.tolist() == [1, 2, 3]


def test_makes_noted_copies_when_the_consumer_of_a_generator_leaves_the_rest() -> None:
    memory, parameter = Memory(a=counting(3), b=counting(3)), torch.zeros(3)

    def tensors() -> Any:
        with memory.promises.noting():
            yield memory["a"]
            yield memory["b"]

    for tensor in tensors():
        parameter.copy_(tensor)
        break
    assert parameter.tolist() == [1, 2, 3]


def test_drops_the_notes_and_passes_on_an_error_of_the_program() -> None:
    memory, parameter = Memory(w=counting(3)), torch.zeros(3)
    with pytest.raises(KeyError, match="lm_head"), memory.promises.noting():
        parameter.copy_(memory["w"])
        raise KeyError("lm_head")
    assert memory.loads == [[]]
    assert isinstance(memory.failure, KeyError)
    assert not parameter.any()


def test_passes_other_modes_and_meta_targets() -> None:
    """Engines count the elements that a loader has copied, and give parameters memory only then."""
    copied = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                copied.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    memory, parameter = Memory(w=counting(6)), torch.zeros(6)
    with memory.promises.noting():
        torch.empty(6, device="meta").copy_(memory["w"])
        with Counter():
            parameter[2:].copy_(memory["w"][2:])
    assert copied == [4]
    assert parameter.tolist() == [0, 0, 3, 4, 5, 6]


def test_counts_the_bytes_that_were_written_of_a_parameter() -> None:
    memory = Memory(a=counting(4, 3))
    fused, padded, untouched = torch.empty(8, 3), torch.empty(6, 3), torch.empty(2)
    listed, summed = torch.empty(8, 3), torch.empty(8, 3)
    with memory.promises.noting():
        for _ in range(2):
            fused[:4].copy_(memory["a"])
        # An engine asks before the block ends, and the copies still wait.
        assert (memory.promises.written(fused), memory.loads) == (fused.nbytes // 2, [])
        padded[:4].copy_(memory["a"])
        padded[4:].fill_(0)
        torch._foreach_copy_([padded[:4], listed[:4]], [memory["a"], memory["a"]])
        torch.add(memory["a"], 1, out=summed[:4])
    written = [memory.promises.written(tensor) for tensor in (fused, padded, untouched, listed, summed)]
    assert written == [fused.nbytes // 2, padded.nbytes, 0, listed.nbytes // 2, summed.nbytes // 2]


def test_reads_before_an_operation_of_an_extension_that_no_mode_sees() -> None:
    """Such an operation has one kernel for all keys, which reads the memory: vLLM packs weights for a CPU so."""
    library = torch.library.Library("promised_test", "DEF")
    library.define("total(Tensor packed) -> float")

    def total(packed: torch.Tensor) -> float:
        with torch._C.DisableTorchFunction():
            address, size = packed.data_ptr(), packed.numel()
        return sum((ctypes.c_float * size).from_address(address))

    library.impl("total", total, "CompositeImplicitAutograd")
    for call in (torch.ops.promised_test.total, torch.ops.promised_test.total.default):
        memory = Memory(a=counting(4, 3))
        parameter = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        with memory.promises.noting():
            parameter.data.copy_(memory["a"])
            assert call(parameter.t()) == 78
        assert call(memory["a"]) == 78
