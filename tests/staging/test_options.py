"""Every switch works alone and together with the others, on a machine without an accelerator too."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions as TorchStagingOptions

from bucketpoint.errors import BucketpointError
from bucketpoint.staging import Stager, StagingOptions, as_staging_options
from staging.helpers import finished

pytestmark = pytest.mark.contract

SWITCHES = ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
COMBINATIONS = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product((False, True), repeat=4)]


def _name(switches: dict[str, bool]) -> str:
    return "+".join(name.removeprefix("use_") for name, on in switches.items() if on) or "none"


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.parametrize("make", [StagingOptions, TorchStagingOptions])
@pytest.mark.parametrize("switches", COMBINATIONS, ids=_name)
def test_stages_without_an_accelerator_in_every_combination(
    switches: dict[str, bool], make: Any, no_accelerator: None, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"w": weight, "column": weight[:, 1], "step": 3}
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG, logger="bucketpoint"):
        warnings.simplefilter("error")
        stager = Stager(make(**switches))
        for step in range(3):
            weight.fill_(step)
            answer = stager.stage(state)
            assert isinstance(answer, Future) == switches["use_async_staging"]
            copied = finished(answer)
            weight.fill_(-1)
            assert copied["w"].tolist() == [[step] * 4] * 3
            assert copied["column"].tolist() == [step] * 3
            assert copied["step"] == 3
            assert copied["w"].is_shared() == switches["use_shared_memory"]
            assert not copied["w"].is_pinned()
            del answer, copied
        stager.close()
    told = [record for record in caplog.records if "no accelerator" in record.message]
    assert [record.levelno for record in told] == [logging.DEBUG]
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_keeps_the_meaning_of_torchs_own_options() -> None:
    for switches in COMBINATIONS:
        taken = as_staging_options(TorchStagingOptions(**switches))
        assert {name: getattr(taken, name) for name in SWITCHES} == switches
        assert taken == StagingOptions(**switches)


def test_returns_the_copy_and_no_future_by_default() -> None:
    assert as_staging_options(None) == StagingOptions()
    assert not isinstance(Stager().stage({"w": torch.ones(1)}), Future)


def test_takes_ours_as_they_are() -> None:
    options = StagingOptions(when_busy="error", max_bytes=1 << 20, unread_timeout_s=math.inf)
    assert as_staging_options(options) is options


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"when_busy": "sometimes"}, "wait, double_buffer, error"),
        ({"when_busy": None}, "wait, double_buffer, error"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"unread_timeout_s": 0}, "unread_timeout_s=0"),
        ({"unread_timeout_s": -1.0}, "unread_timeout_s=-1.0"),
        ({"unread_timeout_s": math.nan}, "unread_timeout_s=nan"),
    ],
)
def test_refuses_a_value_that_cannot_work(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(BucketpointError, match=said):
        StagingOptions(**wrong)


@pytest.mark.parametrize("wrong", [{"use_pinned_memory": True}, "fast", 1, True, SimpleNamespace(use_pinned_memory=1)])
def test_refuses_anything_else_by_name(wrong: Any) -> None:
    with pytest.raises(BucketpointError, match=f"^{type(wrong).__qualname__} does not describe staging options"):
        Stager(wrong)
