"""Saves and loads name the key of the value at fault."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketpoint
from bucketpoint.errors import BucketpointError, StoreError

_MAKERS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged),
    "mkldnn": lambda: torch.randn(4, 4).to_mkldnn(),
    "uninitialized": torch.nn.parameter.UninitializedParameter,
    "lock": threading.Lock,
    "function": lambda: lambda: None,
}


def _background(state: dict[str, Any], url: str) -> None:
    bucketpoint.async_save(state, checkpoint_id=url, storage_writer=bucketpoint.BucketWriter()).result()


@pytest.mark.parametrize("save", [bucketpoint.save, _background])
@pytest.mark.parametrize("name", _MAKERS)
def test_names_the_key_of_a_value_that_cannot_be_saved(
    name: str, save: Callable[[dict[str, Any], str], None], tmp_path: Path
) -> None:
    state = {"model": {"first": torch.ones(2), "the_key": _MAKERS[name](), "last": torch.ones(2)}}
    with pytest.raises(BucketpointError) as caught:
        save(state, tmp_path.as_uri())
    assert caught.value.key == "model.the_key"


@pytest.mark.filterwarnings("ignore")
def test_names_the_key_of_a_value_that_cannot_be_loaded(tmp_path: Path) -> None:
    value = torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.qint8)
    bucketpoint.save({"model": {"first": torch.ones(2), "the_key": value}}, tmp_path.as_uri())
    with pytest.raises(BucketpointError, match=r"model\.the_key"):
        bucketpoint.load({"model": {"first": torch.ones(2), "the_key": torch.zeros(4)}}, tmp_path.as_uri())


def test_names_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(StoreError, match="a file is where a folder should be"):
        bucketpoint.save({"w": torch.ones(1)}, (tmp_path / "run" / "step-1").as_uri())
