"""Any state goes through any row of formats and is the same afterwards, bit for bit."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bucketpoint import BucketWriter
from convert.chunked import GridPlanner
from convert.conftest import converted
from dcp.states import DTYPES, assert_same, filled

safetensors = pytest.importorskip("safetensors.torch")

FORMATS = ["bucketpoint", "torch", "safetensors"]
KEYS = st.text('ab._/é中"\\\n\x00 ', max_size=5)
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
EXTRA = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
NAMED = [dtype for dtype in [*DTYPES, *EXTRA] if dtype != torch.complex128]


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    """Of any dtype and shape; now and then transposed, strided, or part of a larger one."""
    whole = filled(draw(SHAPES), draw(st.sampled_from(dtypes)), seed=draw(st.integers(0, 9)))
    if whole.dim() and draw(st.booleans()):
        axis = draw(st.integers(0, whole.dim() - 1))
        step = draw(st.integers(1, 3))
        whole = whole.transpose(0, axis)[draw(st.integers(0, 2)) :: step]
    return whole


@st.composite
def states(draw: st.DrawFn, dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors by any names, some of them under two."""
    found = draw(st.dictionaries(KEYS, tensors(dtypes), min_size=1, max_size=4))
    for name in draw(st.lists(KEYS, max_size=2)):
        found.setdefault(name, next(iter(found.values())))
    return found


@given(states([*DTYPES, *EXTRA]), states(NAMED), st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_returns_any_state_from_any_row_of_formats(
    any_state: dict[str, Any], named: dict[str, Any], through: list[str], data: st.DataObject
) -> None:
    value = named if "safetensors" in through else any_state
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "0.pt"
        if data.draw(st.booleans()):
            torch.save(value, at)
        else:
            at = Path(folder) / "0"
            writer, planner = BucketWriter(str(at)), GridPlanner(*data.draw(st.sampled_from([(1,), (3,), (2, 4)])))
            dcp.save(value, storage_writer=writer, planner=planner, no_dist=True)
        row = [name for name, _ in itertools.groupby(through)]
        for number, name in enumerate([*row, "torch"], 1):
            last, at = at, Path(folder) / (f"{number}.pt" if name == "torch" else f"{number}")
            converted(last, at, name, shard_bytes=100, object_bytes=200)
            if name == "safetensors":
                found = {
                    key: part for file in at.glob("*.safetensors") for key, part in safetensors.load_file(file).items()
                }
                assert_same(dict(sorted(found.items())), dict(sorted(value.items())))
        found = torch.load(at)
        assert_same(dict(sorted(found.items())), dict(sorted(value.items())))
