"""Arguments of `save`, `load` and `async_save` that are wrong: named at the call, as an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketpoint as bp
from bucketpoint.errors import BucketpointError, InvalidURLError

MODEL: Any = torch.nn.Linear(2, 2)
STATE: Any = MODEL.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda url: bp.save(MODEL, url), "state must be a dict, .*, not Linear"),
        (lambda url: bp.load(MODEL, url), "state must be a dict, .*, not Linear"),
        (lambda url: bp.async_save(MODEL, url), "state must be a dict, .*, not Linear"),
        (lambda url: bp.save(url, STATE), "state must be a dict, .*, not str"),
        (lambda url: bp.save(STATE, None), "url must be a URL or a path, not NoneType"),
        (lambda url: bp.load(STATE, 7), "url must be a URL or a path, not int"),
        (lambda url: bp.save(STATE, url, transfer={"connections": 8}), "transfer must be a TransferOptions, not dict"),
        (lambda url: bp.load(url, transfer={"connections": 8}), "transfer must be a TransferOptions, not dict"),
    ],
)
def test_names_an_argument_of_a_wrong_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BucketpointError, match=message):
        call(f"{tmp_path}/a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [{}, {"storage_writer": bp.S3Writer()}], ids=["no writer", "a writer"])
def test_refuses_an_asynchronous_save_without_a_url_at_the_call(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidURLError, match="No checkpoint URL was given"):
        bp.async_save(STATE, no_dist=True, **given)


def test_takes_the_url_of_an_asynchronous_save_as_save_does(tmp_path: Path) -> None:
    bp.async_save(STATE, f"{tmp_path}/a", no_dist=True).result(60)
    bp.async_save(STATE, storage_writer=bp.BucketWriter(f"{tmp_path}/b"), no_dist=True).result(60)
    assert sorted(path.parent.name for path in tmp_path.glob("*/.metadata")) == ["a", "b"]
