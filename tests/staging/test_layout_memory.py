"""The last layout serves again only where nothing but values has changed, and keeps no tensor alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from bucketpoint.staging import Stager
from bucketpoint.staging import layout as layout_module
from bucketpoint.staging.layout import LayoutMemory
from staging.helpers import finished

pytestmark = pytest.mark.contract


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each layout that is made anew."""
    made: list[int] = []
    lay_out = layout_module.lay_out

    def counted(sources: Any, **options: Any) -> Any:
        made.append(len(sources))
        return lay_out(sources, **options)

    monkeypatch.setattr(layout_module, "lay_out", counted)
    return made


def stage_twice(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    with Stager() as stager:
        del finished(stager.stage(first))["w"]
        staged = finished(stager.stage(second))
        return {name: value.clone() for name, value in dict(staged).items()}


def test_plans_a_dict_made_afresh_over_the_same_memory_only_once(planned: list[int]) -> None:
    w, b = torch.zeros(4, 3), torch.zeros(7)
    staged = stage_twice({"w": w.detach(), "b": b.detach()}, {"w": w.fill_(2).detach(), "b": b.fill_(3).detach()})
    assert staged["w"].unique().tolist() == [2]
    assert staged["b"].unique().tolist() == [3]
    assert planned == [2]


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.view(3, 4),
        lambda w: w.t(),
        lambda w: w.view(torch.int32),
        lambda w: w[1:],
        lambda w: w.clone(),
    ],
    ids=["shape", "strides", "dtype", "address", "memory"],
)
def test_plans_any_other_tensor_again(planned: list[int], other: Any) -> None:
    w = torch.arange(12.0).reshape(4, 3)
    staged = stage_twice({"w": w}, {"w": other(w)})
    assert torch.equal(staged["w"], other(w))
    assert staged["w"].dtype == other(w).dtype
    assert len(planned) == 2


def test_remembers_tied_weights_as_tied(planned: list[int]) -> None:
    w = torch.ones(6)
    with Stager() as stager:
        for step in range(3):
            w.fill_(step)
            staged = finished(stager.stage({"w": w.detach(), "tied": w.detach()}))
            assert staged["w"].data_ptr() == staged["tied"].data_ptr()
            assert staged["tied"].unique().tolist() == [step]
            del staged
    assert planned == [2]


def test_keeps_no_tensor() -> None:
    memory = LayoutMemory()
    tensor = torch.ones(3)
    gone = weakref.ref(tensor.untyped_storage())
    memory.lay_out([tensor])
    memory.lay_out([tensor])
    del tensor
    assert gone() is None
