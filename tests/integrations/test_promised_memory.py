"""Programs that reach the memory of parameters past the operations on them get the right values, or errors."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.promised_calls import before_other_threads
from integrations.test_promised import Memory, counting


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
