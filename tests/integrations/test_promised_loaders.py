"""Loaders that reach the memory of their parameters in unusual ways get the values that they get from real tensors."""

from __future__ import annotations

import asyncio
import copy
import logging
import logging.handlers
import queue
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest
import torch

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.promised_calls import before_other_threads
from integrations.test_promised import Memory, counting

Take = Callable[[str], Any]


class Wrapper(torch.Tensor):
    """A tensor whose class multiplies by other means than operations."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    def __init__(self, inner: torch.Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return torch.from_numpy(args[0].inner.numpy() * 2)


class Function(torch.Tensor):
    """A tensor whose class multiplies by other means than functions of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.from_numpy(args[0].numpy() * 2) if func is torch.Tensor.mul else func(*args, **(kwargs or {}))


LIBRARY = torch.library.Library("promised_loaders", "DEF")
LIBRARY.define("copy_of(Tensor dummy) -> Tensor")
NAMED: dict[str, Any] = {}


def copy_of(dummy: torch.Tensor) -> torch.Tensor:
    """Find the parameter by name, as operations of engines find layers."""
    if "source" in NAMED:
        NAMED["parameter"].copy_(NAMED["source"])
    return NAMED["parameter"].clone()


LIBRARY.impl("copy_of", copy_of, "CPU")


def filled(take: Take, parameter: torch.Tensor) -> torch.Tensor:
    return parameter.copy_(take("a"))


def by_operation(take: Take, parameter: torch.Tensor, **source: Any) -> Any:
    NAMED.clear()
    NAMED.update(parameter=parameter, **source)
    if not source:
        filled(take, parameter)
    return torch.ops.promised_loaders.copy_of(torch.zeros(1)), parameter


def by_thread(take: Take, parameter: torch.Tensor, hand: Callable[[Any, Any], None], wait: Callable[[Any], Any]) -> Any:
    """Double the parameter on a thread that began before the copy."""
    there, done = (queue.Queue[Any](), threading.Event()), threading.Event()

    def work() -> None:
        wait(there)
        parameter.mul_(2)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    filled(take, parameter)
    hand(there, parameter)
    done.wait()
    thread.join()
    return parameter


def by_pool(take: Take, parameter: torch.Tensor) -> Any:
    with ThreadPool(1) as pool:
        pool.apply(int)
        filled(take, parameter)
        pool.apply(parameter.mul_, (2,))
    return parameter


def by_loop(take: Take, parameter: torch.Tensor) -> Any:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def double() -> None:
        parameter.mul_(2)

    filled(take, parameter)
    asyncio.run_coroutine_threadsafe(double(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    return parameter


def by_array(take: Take, tensor: torch.Tensor, array: Any) -> Any:
    """Return what a view that is not torch's has after the copy."""
    tensor.copy_(take("a"))
    return [float(value) for value in memoryview(array).cast("B").cast("f")]


def by_file(take: Take, parameter: torch.Tensor) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        mapped = torch.from_file(file.name, shared=True, size=12).view(4, 3)
        return by_array(take, mapped, np.memmap(file.name, np.float32))


def by_other_process(take: Take, parameter: torch.Tensor) -> Any:
    parameter.share_memory_()
    handle = parameter.untyped_storage()._share_filename_cpu_()
    other = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    filled(take, parameter)
    return bytes(other)


def by_alias(take: Take, alias: Callable[[Any], torch.Tensor]) -> Any:
    source = take("a")
    alias(source).copy_(take("b"))
    return source + 0, torch.zeros(4, 3).copy_(source)


def as_data(source: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    parameter.data = source
    return parameter


def by_sparse(take: Take, sparse: torch.Tensor) -> Any:
    sparse.values().copy_(take("a")[0])
    return sparse.to_dense()


def in_inference_mode(take: Take, parameter: torch.Tensor) -> Any:
    source = take("a")
    with torch.inference_mode():
        return source[2:] * 1, source.view(torch.int32) + 0


BEFORE = torch.zeros(4, 3)
"""Memory that an array shares from before the load on."""
BEFORE_ARRAY = BEFORE.numpy()

LOADERS: dict[str, Callable[[Take, torch.Tensor], Any]] = {
    "tolist": lambda take, p: filled(take, p).tolist(),
    "numpy": lambda take, p: float(filled(take, p).numpy().sum()),
    "float": lambda take, p: float(filled(take, p)[1, 1]),
    "deepcopy": lambda take, p: copy.deepcopy(filled(take, p)),
    "storage": lambda take, p: bytes(filled(take, p).untyped_storage()),
    # vLLM's composed loaders write a function of the parameter into it.
    "function of itself": lambda take, p: p.copy_(-filled(take, p).exp()),
    "write into a view": lambda take, p: (filled(take, p).view(-1)[1:].zero_(), p),
    "stack": lambda take, p: torch.stack([filled(take, p), p]),
    "apply_": lambda take, p: filled(take, p).apply_(lambda value: 2 * value),
    "apply_ to the source": lambda take, p: take("a").apply_(lambda value: 2 * value),
    "map_": lambda take, p: torch.ones(4, 3).map_(filled(take, p), lambda one, other: one + other),
    "tensor": lambda take, p: torch.tensor([filled(take, p)[0, 0], p[1, 1]]),
    "Tensor": lambda take, p: torch.Tensor([filled(take, p)[0, 0], p[1, 1]]),
    "new_tensor": lambda take, p: p.new_tensor([filled(take, p)[0, 0]]),
    "tensor of the source": lambda take, p: torch.tensor([take("a")[0, 1]]),
    "repr": lambda take, p: repr(filled(take, p)),
    "clone": lambda take, p: take("a")[2:].clone().as_strided((2,), (1,), 0) + 0,
    "copy to a device": lambda take, p: torch.zeros(2).copy_(
        take("a")[2:].to("cpu", copy=True).as_strided((2,), (1,), 1)
    ),
    "storage of a clone": lambda take, p: bytes(take("a")[2:].clone().untyped_storage()),
    "view by dtype": lambda take, p: by_alias(take, lambda source: source.view(torch.int32).view(torch.float32)),
    "data": lambda take, p: by_alias(take, as_data),
    "set_": lambda take, p: by_alias(take, lambda source: torch.zeros(1).set_(source)),
    "coo": lambda take, p: by_sparse(
        take, torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), torch.zeros(3), is_coalesced=True)
    ),
    "csr": lambda take, p: by_sparse(
        take, torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2]), torch.zeros(3))
    ),
    "wrapper": lambda take, p: (filled(take, p), Wrapper(p) * 2),
    "function": lambda take, p: filled(take, p.as_subclass(Function)).mul(2),
    "operation": lambda take, p: by_operation(take, p),
    "copy in an operation": lambda take, p: by_operation(take, p, source=take("a")),
    "pool": by_pool,
    "queue": lambda take, p: by_thread(take, p, lambda there, item: there[0].put(item), lambda there: there[0].get()),
    "event": lambda take, p: by_thread(take, p, lambda there, _: there[1].set(), lambda there: there[1].wait()),
    "loop": by_loop,
    "file": by_file,
    "other process": by_other_process,
    "from_numpy": lambda take, p: by_array(take, torch.from_numpy(array := np.zeros((4, 3), np.float32)), array),
    "numpy before": lambda take, p: by_array(take, BEFORE, BEFORE_ARRAY),
    "frombuffer": lambda take, p: by_array(
        take, torch.frombuffer(data := bytearray(48), dtype=torch.float32).view(4, 3), data
    ),
    "inference mode": in_inference_mode,
}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", LOADERS)
def test_gives_a_loader_what_real_tensors_give_it(name: str) -> None:
    memory = Memory(a=counting(4, 3), b=counting(4, 3, start=21))
    BEFORE.zero_()
    expected = plain(LOADERS[name](lambda key: memory.saved[key].clone(), torch.zeros(4, 3)))
    promises: dict[str, Any] = {}
    BEFORE.zero_()
    with memory.promises.noting():
        result = LOADERS[name](lambda key: promises.setdefault(key, memory[key]), torch.zeros(4, 3))
    assert plain(result) == expected


def test_keeps_the_order_of_copies_from_two_checkpoints() -> None:
    one, other = Memory(w=counting(4)), Memory(w=counting(4, start=21))
    first, second, third = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    with one.promises.noting(), other.promises.noting():
        first.copy_(one["w"])
        first[:2].copy_(other["w"][:2])
        second.copy_(other["w"])
        second[:2].copy_(one["w"][:2])
        third.copy_(one["w"].clone())
    assert [first.tolist(), second.tolist(), third.tolist()] == [[21, 22, 3, 4], [1, 2, 23, 24], [1, 2, 3, 4]]


def test_refuses_a_load_during_which_an_outer_mode_ended() -> None:
    memory = Memory(a=counting(3), b=counting(3))

    def tensors() -> Any:
        with memory.promises.noting():
            yield memory["a"]
            yield memory["b"]

    iterator = tensors()
    with torch.device("cpu"):
        next(iterator)
    with pytest.raises(BucketpointError, match=r"A mode of torch.* began before the first tensor"):
        list(iterator)


def test_refuses_what_torch_refuses_and_to_give_memory_of_unread_tensors() -> None:
    memory = Memory(a=counting(3))
    with memory.promises.noting():
        with pytest.raises(RuntimeError, match="size"):
            torch.zeros(4).copy_(memory["a"])
        with pytest.raises(RuntimeError):
            memory["a"].view(2, 2)
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(memory["a"])
        with pytest.raises(RuntimeError, match="size"):
            torch.empty(4, device="meta").copy_(memory["a"])
        torch.zeros(0, 3).copy_(memory["a"][:0].view(0, 1).expand(0, 3))
        assert not memory.loads
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.zeros(1).expand(3).copy_(memory["a"])
    assert memory.keys == [["a"], []]


@pytest.mark.parametrize("pooled", [False, True])
def test_makes_noted_copies_before_another_thread_uses_them(pooled: bool) -> None:
    memory, parameter = Memory(w=counting(3)), torch.zeros(3)
    with ThreadPoolExecutor(1) as pool, memory.promises.noting():
        parameter.copy_(memory["w"])
        if pooled:
            pool.submit(parameter.mul_, 2).result()
        else:
            thread = threading.Thread(target=parameter.mul_, args=(2,))
            thread.start()
            thread.join()
    assert parameter.tolist() == [2, 4, 6]


def test_leaves_the_functions_of_threads_as_they_were_in_any_order_of_ends() -> None:
    before, acts = (threading.Thread.start, ThreadPoolExecutor.submit), []
    first, second = before_other_threads(lambda: acts.append(1)), before_other_threads(lambda: acts.append(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    threading.Thread(target=int).start()
    second.__exit__(None, None, None)
    threading.Thread(target=int).start()
    assert ((threading.Thread.start, ThreadPoolExecutor.submit), set(acts)) == (before, {2})


class LoggedMemory(Memory):
    """Saved tensors whose loads log on a thread of their own."""

    def load(self, *given: Any, **options: Any) -> None:
        thread = threading.Thread(target=logging.getLogger("bucketpoint").warning, args=("by the load",))
        thread.start()
        thread.join()
        super().load(*given, **options)


def test_loads_while_log_messages_go_through_a_queue() -> None:
    messages: queue.Queue[Any] = queue.Queue()
    handler, logger = logging.handlers.QueueHandler(messages), logging.getLogger("bucketpoint")
    logger.addHandler(handler)

    def load() -> None:
        memory, parameter = LoggedMemory(w=counting(3)), torch.zeros(3)
        with memory.promises.noting():
            parameter.copy_(memory["w"])
            logger.warning("by the program")

    thread = threading.Thread(target=load, daemon=True)
    try:
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert [messages.get_nowait().msg for _ in range(2)] == ["by the program", "by the load"]
    finally:
        logger.removeHandler(handler)


def test_finds_waiting_elements_by_their_address() -> None:
    """Arrays that others see as they are written, and storages that share memory."""
    memory, parameter, base = Memory(w=counting(3)), torch.zeros(3), np.zeros(3, np.float32)
    whole, rest = torch.from_numpy(base), torch.from_numpy(base[1:])
    with memory.promises.noting():
        array = parameter.numpy()
        parameter.copy_(memory["w"])
        array *= 2
        whole.copy_(memory["w"])
        assert (whole.expand(2, 3) + 1).tolist() == [[2, 3, 4]] * 2
        whole.copy_(memory["w"])
        rest.mul_(2)
        whole[:1].copy_(memory["w"][2:])
        with pytest.raises(AttributeError):
            _ = whole.__cuda_array_interface__
        assert base.tolist() == [3, 4, 6]
    assert parameter.tolist() == [2, 4, 6]


@pytest.mark.parametrize("whole", [False, True])
def test_ends_with_an_error_of_a_read_that_the_program_caught(whole: bool) -> None:
    memory, parameter = Memory(w=counting(3)), torch.zeros(3)
    with pytest.raises(KeyError, match="w"), memory.promises.noting():
        promise = memory["w"]
        del memory.saved["w"]
        with suppress(KeyError):
            if whole:
                parameter[torch.tensor([0, 1, 2])] = promise
            else:
                parameter.copy_(promise)
                parameter.mul_(2)
    assert isinstance(memory.failure, KeyError)


def test_refuses_to_turn_a_promised_tensor_in_place() -> None:
    memory = Memory(w=counting(3, 3))
    with memory.promises.noting():
        for turn in (
            lambda promise: promise.t_(),
            lambda promise: promise.set_(torch.ones(3, 3)),
            lambda promise: promise.resize_(2, 2),
            lambda promise: setattr(promise, "data", torch.ones(3, 3)),
        ):
            for promise in (memory["w"], memory["w"].clone()):
                with pytest.raises(BucketpointError, match="gives a tensor other elements"):
                    turn(promise)
    with pytest.raises(BucketpointError, match="gives a tensor other elements"):
        memory["w"].resize_(2, 2)
