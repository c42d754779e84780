"""On a CUDA device: copies come after the kernels that were under way, through memory that is pinned once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from bucketpoint.staging import Stager, StagingOptions
from staging.helpers import Upload, both_kinds, finished, memory_of, sync_and_async

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

pinned_or_not = pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])

LONG_CYCLES = 200_000_000
"""About a tenth of a second: far longer than `stage()` takes to get going."""


@pytest.fixture(autouse=True)
def synchronized() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def weights(value: float = 0, count: int = 1 << 20) -> torch.Tensor:
    made = torch.full((count,), float(value), device="cuda")
    torch.cuda.synchronize()
    return made


def add_later(weight: torch.Tensor) -> None:
    """Queue an addition that has not begun when this returns."""
    torch.cuda._sleep(LONG_CYCLES)
    weight.add_(1)


@sync_and_async
@both_kinds
@pinned_or_not
@pytest.mark.parametrize("non_blocking", [False, True], ids=["blocking", "non_blocking"])
def test_sees_a_kernel_that_still_runs_always_in_the_copy(
    beside: bool, shared: bool, pinned: bool, non_blocking: bool
) -> None:
    with Stager(StagingOptions(pinned, shared, beside, non_blocking)) as stager:
        weight = weights()
        # The first stage() allocates and registers, and would be late by itself.
        finished(stager.stage({"w": weight, "column": weight.view(1024, 1024)[:, 3]}))
        for step in range(1, 6):
            add_later(weight)
            copied = finished(stager.stage({"w": weight, "column": weight.view(1024, 1024)[:, 3]}))
            assert copied["w"].unique().tolist() == [step]
            assert copied["column"].unique().tolist() == [step]
            del copied


@sync_and_async
def test_sees_a_kernel_on_the_callers_own_stream(beside: bool) -> None:
    with Stager(StagingOptions(use_async_staging=beside)) as stager:
        weight = weights()
        finished(stager.stage({"w": weight}))
        stream = torch.cuda.Stream()
        for step in range(1, 4):
            with torch.cuda.stream(stream):
                add_later(weight)
                copied = finished(stager.stage({"w": weight}))
            assert copied["w"].unique().tolist() == [step]
            del copied


@sync_and_async
def test_allows_changes_of_the_state_once_it_is_staged(beside: bool) -> None:
    with Stager(StagingOptions(use_async_staging=beside, when_busy="double_buffer")) as stager:
        weight = weights()
        uploads = []
        for step in range(1, 5):
            weight.fill_(step)
            copied = finished(stager.stage({"w": weight}))
            weight.fill_(-step)
            torch.cuda.synchronize()
            assert copied["w"].unique().tolist() == [step]
            uploads.append(Upload(copied))
            uploads[-1].finish()
            del copied


@sync_and_async
def test_copies_sources_whole_that_are_freed_right_after_stage(beside: bool) -> None:
    with Stager(StagingOptions(use_async_staging=beside)) as stager:
        for step in range(5):
            weight = weights(step, 1 << 24)
            answer = stager.stage({"w": weight})
            del weight
            # Of the same size, so that the allocator would hand out the freed memory.
            other = torch.full((1 << 24,), -1.0, device="cuda")
            copied = finished(answer)
            assert copied["w"].unique().tolist() == [step]
            del copied, answer, other


@sync_and_async
@both_kinds
def test_pins_staging_memory_that_stays_where_it_is(beside: bool, shared: bool) -> None:
    with Stager(StagingOptions(use_async_staging=beside, use_shared_memory=shared)) as stager:
        addresses = set()
        for step in range(5):
            copied = finished(stager.stage({"w": weights(step), "small": torch.ones(3, device="cuda")}))
            assert copied["w"].is_pinned()
            assert copied["small"].is_pinned()
            assert copied["w"].is_shared() == shared
            addresses.add(memory_of(copied))
            del copied
        assert len(addresses) == 1


def test_pins_memory_again_after_close() -> None:
    """A registration that is left behind makes the next one at its address fail."""
    for _ in range(5):
        with Stager() as stager:
            copied = finished(stager.stage({"w": weights(1, 1 << 24)}))
            assert copied["w"].is_pinned()
            del copied
        gc.collect()


@sync_and_async
def test_stages_tensors_of_device_and_processor_together(beside: bool) -> None:
    on_device, on_host = weights(2), torch.full((100,), 3.0)
    z = torch.randn(8, 8, dtype=torch.complex64, device="cuda")
    with Stager(StagingOptions(use_async_staging=beside)) as stager:
        copied = finished(
            stager.stage(
                {
                    "d": on_device,
                    "h": on_host,
                    "tied": on_device.view(-1, 4),
                    "t": z.t(),
                    "conj": z.conj(),
                    "expanded": on_device[:1].expand(50),
                    "bf16": on_device[:7].bfloat16(),
                    "scalar": torch.tensor(4.0, device="cuda"),
                    "empty": torch.empty(0, device="cuda"),
                    "sparse": torch.eye(3, device="cuda").to_sparse(),
                }
            )
        )
        on_host.zero_()
        assert {tensor.device.type for tensor in copied.values()} == {"cpu"}
        assert copied["d"].unique().tolist() == [2]
        assert copied["h"].unique().tolist() == [3]
        assert copied["tied"].data_ptr() == copied["d"].data_ptr()
        assert torch.equal(copied["t"], z.t().cpu())
        assert torch.equal(copied["conj"], z.conj().cpu().resolve_conj())
        assert copied["expanded"].tolist() == [2] * 50
        assert copied["bf16"].tolist() == [2] * 7
        assert copied["scalar"].item() == 4
        assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
        del copied


@sync_and_async
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second CUDA device here")
def test_stages_tensors_of_another_device_than_the_current(beside: bool) -> None:
    current = torch.cuda.current_device()
    others = [torch.full((1 << 20,), float(index), device=f"cuda:{index}") for index in range(2)]
    with Stager(StagingOptions(use_async_staging=beside)) as stager:
        for step in range(1, 4):
            for tensor in others:
                with torch.cuda.device(tensor.device):
                    add_later(tensor)
                    # stage() sees the current stream of each device, whichever device is current.
            copied = finished(stager.stage({str(index): tensor for index, tensor in enumerate(others)}))
            assert [copied[str(index)].unique().tolist() for index in range(2)] == [[step], [step + 1.0]]
            del copied
    assert torch.cuda.current_device() == current


def test_keeps_no_device_memory_by_a_staged_state() -> None:
    for shared in (False, True):
        for beside in (False, True):
            with Stager(StagingOptions(use_shared_memory=shared, use_async_staging=beside)) as stager:
                before = torch.cuda.memory_allocated()
                weight = weights(1, 1 << 22)
                copied = finished(stager.stage({"w": weight}))
                del weight
                stager.synchronize_staging()
                # The worker lets go of its job when it takes the next.
                del copied
                finished(stager.stage({"w": torch.ones(1)}))
                assert torch.cuda.memory_allocated() == before
