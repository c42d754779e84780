"""What conversions in the tests begin from, and what is asked of what they end in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader
from bucketpoint.convert import Converted, ConvertOptions, pipeline, plan_conversion, run_conversion
from bucketpoint.errors import StoreError
from bucketpoint.stores import open_store
from bucketpoint.transfer import TransferOptions
from cli.conftest import enter, fresh_clients  # noqa: F401
from dcp.states import blank, filled
from transfer.wrappers import FailingStore

SMALL = TransferOptions(max_inflight_bytes=32 << 20, part_bytes=5 << 20, connections=4)
ONE_BY_ONE = TransferOptions(max_inflight_bytes=16 << 20, connections=1)


@pytest.fixture(params=["file", "minio"])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty place, reached as a person would: by the environment."""
    if request.param == "file":
        return f"file://{tmp_path}/there"
    return in_minio(request, monkeypatch)


@pytest.fixture
def minio_root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return in_minio(request, monkeypatch)


def in_minio(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    server = request.getfixturevalue("minio")
    enter(monkeypatch, server.env)
    return f"s3://{server.make_bucket()}/there"


def state() -> dict[str, Any]:
    """A tensor of several parts and blocks, ones of other dtypes and layouts, and plain objects."""
    return {
        "model": {
            "large": filled((6, 1 << 18), torch.float32, seed=1),
            "wide": filled((3, 700), torch.bfloat16, seed=2),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "columns": filled((40, 30), torch.float32, seed=3).t(),
        },
        "optim": {"state": {"large": {"step": torch.tensor(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": 7,
    }


def converted(source: Any, target: Any, to: str = "auto", **options: Any) -> Converted:
    transfer = options.pop("transfer", SMALL)
    trusted_from = options.pop("from_format", "auto")
    plan = plan_conversion(
        source, target, from_format=trusted_from, to_format=to, options=ConvertOptions(**options), transfer=transfer
    )
    done = run_conversion(plan, verify=True)
    assert not done.damaged
    return done


@contextmanager
def behind(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Plans of this block write to their targets through a wrapper of the store."""
    opened = pipeline.open_place

    def wrapped(place: Any) -> Any:
        store, prefix = opened(place)
        return wrap(store), prefix

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "open_place", wrapped)
        yield


def killed(when: Callable[[str, int], bool]) -> Callable[[Any], FailingStore]:
    """A wrapper that fails the requests which this picks by name and number."""
    return lambda inner: FailingStore(inner, when, lambda: StoreError("killed"))


def load(url: Any, like: Any) -> Any:
    """What is at the URL, by our reader, into blanks of what it should be."""
    target = blank(like)
    dcp.load(target, checkpoint_id=str(url), storage_reader=BucketReader(), no_dist=True)
    return target


def names(url: str) -> set[str]:
    store, prefix = open_store(url)
    above = f"{prefix}/" if prefix else ""
    return {info.key.removeprefix(above) for info in store.list(above)}


def contents(url: str, name: str) -> bytes:
    store, prefix = open_store(url)
    return store.get(f"{prefix}/{name}" if prefix else name)[0]
