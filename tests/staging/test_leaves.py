"""Values that DCP pickles as one and that hold tensors: in the background they are saved as `bucketpoint.save` does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import bucketpoint
from bucketpoint import BucketReader, BucketWriter, StagingOptions
from bucketpoint.staging import Stager

BIG = 100_000
"""Elements of the tensor beside each leaf: its bytes are in no leaf."""


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Labelled(torch.Tensor):
    """A subclass that holds its own bytes."""


def many_tuples() -> dict[str, Any]:
    return {f"l{i}": (torch.zeros(2, 8), torch.ones(2, 8)) for i in range(10)}


def mixed_dtypes() -> dict[str, Any]:
    whole = torch.arange(8.0)
    kinds = (whole, whole[:2], whole.view(torch.int32), torch.zeros(0, dtype=torch.int64), torch.tensor(True))
    return {"kinds": kinds, "conjugate": (torch.ones(3, dtype=torch.complex64).conj(), torch.ones(2).expand(3, 2))}


def views() -> dict[str, Any]:
    whole = torch.arange(float(BIG))
    columns = whole.view(100, -1)
    return {"plain": whole, "part": (whole[:10], whole[5:20]), "column": (columns[:, 3],), "many": [(1, whole[:9])] * 9}


def nested() -> dict[str, Any]:
    inner = {"a": torch.arange(5.0), "b": torch.arange(3)}
    return {
        "inner": inner,
        "held": (inner, 1),
        "list": [(torch.ones(2), 1), ([torch.zeros(1)], 2)],
        "pair": Pair(torch.zeros(4), torch.ones(4, dtype=torch.int16)),
    }


def subclass() -> dict[str, Any]:
    return {"labelled": torch.arange(10.0).as_subclass(Labelled), "returned": torch.max(torch.ones(3, 3), 0)}


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor) and hasattr(type(one), "__tensor_flatten__"):
        for name in one.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            assert_same(getattr(one, name), getattr(other, name))
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bits = [each.resolve_conj().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
        assert torch.equal(*bits)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, Pair):
        assert_same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.parametrize("make", [many_tuples, mixed_dtypes, views, nested, subclass], ids=lambda make: make.__name__)
def test_pickles_leaves_with_their_own_bytes(tmp_path: Path, make: Callable[[], dict[str, Any]]) -> None:
    state = {"big": torch.arange(float(BIG)), **make()}
    held = sum(value.nbytes for value in state.values() if type(value) is torch.Tensor)
    for name, options in (("shared", StagingOptions()), ("private", StagingOptions(use_shared_memory=False))):
        with contextlib.closing(BucketWriter(staging=options)) as writer:
            bucketpoint.async_save(
                state, checkpoint_id=f"{tmp_path}/{name}", storage_writer=writer, no_dist=True
            ).result()
        assert held <= size(tmp_path / name) < held + 40_000
        assert_same(bucketpoint.load(f"{tmp_path}/{name}", trusted=True).pop("big"), state["big"])
    with Stager() as stager:
        staged: Any = stager.stage(state)
        assert_same({key: staged[key] for key in staged}, state)
        dcp.async_save(
            staged, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), async_stager=_Staged(), no_dist=True
        ).result()
    assert size(tmp_path / "stock") < held + 40_000


class _Staged(Stager):
    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        return state_dict


def test_shares_the_storage_of_overlapping_tensors_of_a_leaf() -> None:
    whole = torch.arange(100.0)
    with Stager() as stager:
        staged: Any = stager.stage({"big": torch.zeros(BIG), "pair": (whole, whole[5:10]), "one": [(whole,), (whole,)]})
        first, second = staged["pair"]
        assert first.untyped_storage().nbytes() == whole.nbytes
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert staged["one"][0][0] is staged["one"][1][0]


def quantised(name: str) -> dict[str, Any]:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 128)).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, name)())
    return {"model": model.state_dict()}


def optimized(name: str, *, step: bool = True) -> dict[str, Any]:
    optim = pytest.importorskip("torchao.optim")
    model = nn.Linear(128, 256, bias=False)
    optimizer = getattr(optim, name)(model.parameters())
    model(torch.ones(2, 128) if step else torch.zeros(2, 128)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


CONFIGS, OPTIMIZERS = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig"), ("AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.mark.parametrize("name", [*CONFIGS, *OPTIMIZERS])
def test_saves_and_loads_subclasses_of_torchao_bit_for_bit(tmp_path: Path, name: str) -> None:
    # The optimizers are compiled otherwise, which takes a minute.
    with torch.compiler.set_stance("force_eager"):
        state, into = (
            (quantised(name), quantised(name)) if name in CONFIGS else (optimized(name), optimized(name, step=False))
        )
    bucketpoint.save(state, tmp_path / "save")
    with contextlib.closing(BucketWriter()) as writer:
        bucketpoint.async_save(
            {**state, "big": torch.zeros(BIG)}, checkpoint_id=f"{tmp_path}/async", storage_writer=writer, no_dist=True
        ).result()
    assert size(tmp_path / "async") < size(tmp_path / "save") + 4 * BIG + 10_000
    dcp.load(into, storage_reader=BucketReader(tmp_path / "async", trusted=True), no_dist=True)
    assert_same(into, state)
