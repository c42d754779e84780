"""Loads that leave a part of the state as it was say so, with the reason, and loads that do so on purpose do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import bucketpoint as bp
from bucketpoint.dcp.planning import unused_keys
from bucketpoint.errors import MismatchError
from dcp.ranks import Ranks

MODEL = {"layers.0.weight": torch.ones(2), "layers.0.bias": torch.ones(2), "layers.1.weight": torch.ones(2)}


def trained(kind: Callable[..., Any] = torch.optim.AdamW, steps: int = 1, **options: Any) -> Any:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def flat(steps: int) -> dict[str, Any]:
    """Return the flat state of an optimizer that holds a tensor before its first step, too."""
    model, optimizer = trained(steps=max(steps, 1), lr=torch.tensor(0.1))
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {name: value for name, value in state.items() if steps or not name.startswith("state.")}


def adam(steps: int) -> dict[str, Any]:
    return dict(trained(steps=steps)[1].state_dict())


def sgd(steps: int) -> dict[str, Any]:
    return dict(trained(torch.optim.SGD, steps, lr=0.1)[1].state_dict())


def prefixed(prefix: str, state: dict[str, Any] = MODEL) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


PLANNERS: dict[str, Callable[..., Any]] = {"ours": bp.LoadPlanner, "torch's": DefaultLoadPlanner}


def warnings_of(
    caplog: pytest.LogCaptureFixture, url: str, state: dict[str, Any], planner: str, partial: bool
) -> list[str]:
    caplog.clear()
    plans = PLANNERS[planner](allow_partial_load=partial)
    with caplog.at_level(logging.INFO, logger="bucketpoint"):
        dcp.load(state, checkpoint_id=url, storage_reader=bp.BucketReader(), planner=plans, no_dist=True)
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == unused_keys.__name__ and record.levelno >= logging.WARNING
    ]


GRADIENT = "only while no parameter has a gradient"
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    **{
        name: ({name: adam(1)}, {name: adam(0)}, [f"none of the 6 keys below '{name}.state' is loaded", GRADIENT])
        for name in ("optim", "opt_state", "OPTIMIZER")
    },
    "optimizer in an application": (
        {"app": {"net": MODEL, "opt": adam(1)}},
        {"app": {"net": MODEL, "opt": adam(0)}},
        ["none of the 6 keys below 'app.opt.state'", GRADIENT],
    ),
    "optimizer alone": (adam(1), adam(0), ["none of the 6 keys below 'state'", GRADIENT]),
    "flat optimizer": ({"o": flat(1)}, {"o": flat(0)}, ["none of the 6 keys below 'o'", "o.state.", GRADIENT]),
    "lazy": ({"ema": {"average": 5, "n": 3}}, {"ema": {}}, ["the 2 keys below 'ema'", "keys='ema'", "first use"]),
    "lazy, deeper": ({"a": {"ema": MODEL, "n": 3}}, {"a": {"ema": {}, "n": 0}}, ["the 3 keys below 'a.ema'"]),
    "lazy None": ({"ema": {"average": torch.ones(2)}}, {"ema": None}, ["the 1 keys below 'ema'"]),
    "torch.compile": (
        {"model": prefixed("_orig_mod.")},
        {"model": MODEL},
        [
            "3 of 3 compared keys",
            "'_orig_mod.' in the checkpoint, which torch.compile adds",
            "{'_orig_mod.' + name: value",
        ],
    ),
    "layers that are compiled": (
        {"model": {name.replace("layers.", "layers._orig_mod."): value for name, value in MODEL.items()}, "n": 1},
        {"model": MODEL, "n": 0},
        ["model.layers.0.bias, and the checkpoint model.layers._orig_mod.0.bias"],
    ),
    "DDP, in the state": (
        {"model": MODEL},
        {"model": prefixed("module.")},
        ["'module.' in the state", "name.replace('module.', '', 1)"],
    ),
    "several prefixes": (
        {"model": prefixed("_orig_mod.module.")},
        {"model": MODEL},
        ["'_orig_mod.module.' in the checkpoint"],
    ),
    "a prefix in one part": (
        {"model": {**MODEL, **prefixed("head.module.")}},
        {"model": {**MODEL, **prefixed("head.")}},
        ["3 of 3 compared keys", "model.head.layers.0.bias, and the checkpoint model.head.module.layers.0.bias"],
    ),
    "another nesting": ({"model": MODEL}, dict(MODEL), ["'model.' in the checkpoint", "{'model.' + name: value"]),
    "other names": (
        {"model": {"blocks.0.w": torch.ones(2)}},
        {"model": {"layers.0.weight": torch.ones(2)}},
        ["the state has model.layers.0.weight, and the nearest keys of the checkpoint are model.blocks.0.w"],
    ),
    "another top-level key": ({"net": MODEL}, {"model": {"a.v": torch.ones(2)}}, ["nothing is loaded"]),
    "a prefix of a state that trains": (
        {"model": MODEL, "opt": {"state": prefixed("module."), "param_groups": [{"lr": 1}]}},
        {"model": MODEL, "opt": {"state": MODEL, "param_groups": [{"lr": 0}]}},
        ["none of the 3 keys below 'opt.state' is loaded, such as opt.state.module.layers.0.weight; 3 of 3 compared"],
    ),
}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("case", LOSSES)
def test_warns_of_what_is_silently_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, planner: str
) -> None:
    saved, state, said = LOSSES[case]
    dcp.save(saved, checkpoint_id=tmp_path, storage_writer=bp.BucketWriter(progress=False), no_dist=True)
    (warning,) = warnings_of(caplog, str(tmp_path), {**state}, planner, partial=True)
    assert [words for words in said if words not in warning] == []


ON_PURPOSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything": ({"model": MODEL, "opt": adam(1), "n": 1}, {"model": MODEL, "opt": adam(1), "n": 0}),
    "weights alone": ({"model": MODEL, "opt": adam(1), "n": 1}, {"model": MODEL}),
    "a part of the weights": ({"model": MODEL}, {"model": {"layers.0.bias": torch.zeros(2)}}),
    "the step of an application": ({"app": {"n": 1, "model": MODEL, "opt": adam(1)}}, {"app": {"n": 0}}),
    "nothing": ({"model": MODEL}, {}),
    "an optimizer without momentum": ({"model": MODEL, "opt": sgd(1)}, {"model": MODEL, "opt": sgd(0)}),
    "an optimizer saved before its first step": ({"n": 1, "opt": adam(0)}, {"n": 0, "opt": adam(0)}),
    "what is empty in both": ({"n": 1, "extra": {}, "list": []}, {"n": 0, "extra": {}, "list": []}),
    "a new head": ({"model": {**MODEL, "head.old": torch.ones(1)}}, {"model": {**MODEL, "top.w": torch.ones(3)}}),
    "an empty tensor": ({"model": {"w": torch.ones(0)}, "n": 1}, {"model": {"w": torch.ones(0)}}),
}


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("case", ON_PURPOSE)
def test_ignores_what_is_left_out_on_purpose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, planner: str
) -> None:
    saved, state = ON_PURPOSE[case]
    dcp.save(saved, checkpoint_id=tmp_path, storage_writer=bp.BucketWriter(progress=False), no_dist=True)
    assert warnings_of(caplog, str(tmp_path), {**state}, planner, partial=True) == []


def load_stages(rank: int, world: int, url: str, stages: list[dict[str, Any]], ours: bool) -> list[str]:
    """Load the part of this rank, and return what was logged as a warning."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bucketpoint").addHandler(handler)
    try:
        planner = bp.LoadPlanner() if ours else None
        dcp.load(stages[rank], checkpoint_id=url, storage_reader=bp.BucketReader(progress=False), planner=planner)
    finally:
        logging.getLogger("bucketpoint").removeHandler(handler)
    return told


@pytest.mark.parametrize("planner", PLANNERS)
def test_compares_what_all_ranks_load(two_ranks: Ranks, tmp_path: Path, planner: str) -> None:
    stages = [{"model": {f"stage{rank}.w": torch.ones(2)}, "opt": adam(rank)} for rank in range(2)]
    state = {"model": {**stages[0]["model"], **stages[1]["model"]}, "opt": stages[1]["opt"]}
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=bp.BucketWriter(progress=False), no_dist=True)
    url, ours = str(tmp_path), planner == "ours"
    # Rank 0 has an optimizer without a state, whose tensors rank 1 loads.
    assert two_ranks.run(load_stages, url, stages, ours) == [[], []]
    lazy = [stages[0], {**stages[1], "opt": adam(0)}]
    warned, silent = two_ranks.run(load_stages, url, lazy, ours)
    assert "none of the 6 keys below 'opt.state' is loaded" in warned[0]
    assert silent == []


@pytest.mark.parametrize(
    ("saved", "state", "said"),
    [
        (
            {"model": prefixed("_orig_mod.")},
            {"model": MODEL},
            "the state has model.layers.0.weight, and the checkpoint model._orig_mod.layers.0.weight",
        ),
        ({"net": MODEL}, {"net": prefixed("module.")}, "'module.' in the state, which DistributedDataParallel adds"),
        ({"net": MODEL}, {"net": {"layers.0.wieght": torch.ones(2)}}, "nearest keys of the checkpoint are net.layers"),
        ({"model": MODEL, "ema": {"n": 1}}, {"model": MODEL, "ema": {}}, "none of the 1 keys below 'ema' is loaded"),
    ],
)  # fmt: skip
def test_names_the_nearest_keys_in_errors(tmp_path: Path, saved: Any, state: Any, said: str) -> None:
    bp.save(saved, tmp_path)
    with pytest.raises(MismatchError) as caught:
        bp.load(state, tmp_path, strict=True)
    assert said in str(caught.value)
