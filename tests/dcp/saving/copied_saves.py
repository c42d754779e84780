"""Saves with `unchanged="copy"` for tests: states of which most never changes, and counts of what a save sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader, BucketWriter
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import Verification, verify
from bucketpoint.location import Location
from bucketpoint.stores import ObjectInfo, open_store
from dcp.states import assert_loads, filled
from fsspec_backends import IN_PROCESS, SERVED, backend
from services import Service
from transfer.wrappers import CountingStore

MIB = 1 << 20

STORES = ["minio", "moto", "gcs", "gcs_xml", "versitygw", "path", *IN_PROCESS, *SERVED]
"""`path` is a folder without a filesystem object, for which bucketpoint has a store of its own."""


@dataclass(frozen=True)
class Run:
    """A folder of checkpoints, and how to reach it."""

    root: str
    options: dict[str, Any] = field(default_factory=dict)
    fs: Any = None

    def url(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def writer(self, **arguments: Any) -> BucketWriter:
        arguments = {"unchanged": "copy", "progress": False, **arguments}
        return BucketWriter(storage_options=self.options, fs=self.fs, **arguments)

    def save(self, state: dict[str, Any], step: int, writer: BucketWriter) -> None:
        dcp.save(state, checkpoint_id=self.url(step), storage_writer=writer, no_dist=True)

    def assert_holds(self, step: int, state: dict[str, Any]) -> None:
        assert_loads(state, BucketReader(storage_options=self.options, fs=self.fs, progress=False), self.url(step))

    def verified(self, step: int) -> Verification:
        return verify(open_checkpoint(Location.of(self.url(step), self.options, self.fs)))

    def objects(self, step: int) -> tuple[Any, dict[str, ObjectInfo]]:
        """The store of a checkpoint, and all objects there, by their path below the checkpoint's URL."""
        store, prefix = open_store(self.url(step), storage_options=self.options, fs=self.fs)
        above = prefix + "/" if prefix else ""
        return store, {info.key.removeprefix(above): info for info in store.list(above)}

    def delete(self, step: int) -> None:
        store, found = self.objects(step)
        assert not store.delete([info.key for info in found.values()])

    def download(self, step: int, folder: Path) -> None:
        """Fetch all objects of a checkpoint, for a stock reader."""
        store, found = self.objects(step)
        for name, info in found.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(store.get(info.key)[0])


def copy_any_size(patch: pytest.MonkeyPatch) -> None:
    for name in ("uploads", "unchanged"):
        patch.setattr(f"bucketpoint.dcp.saving.{name}.LEAST_COPIED_BYTES", 1)


@contextmanager
def run_on(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    if name == "path":
        yield Run(str(tmp_path / "run"))
    elif name in (*IN_PROCESS, *SERVED):
        with backend(name, request, tmp_path) as found:
            yield Run(f"{found.url}/run", fs=found.fs)
    else:
        service = Service.on(request.getfixturevalue(name))
        yield Run(service.url("run"), service.options)


class Watch:
    """Counts of what a writer does in its stores; `around` may wrap each store further."""

    def __init__(self, writer: BucketWriter, around: Callable[[Any], Any] | None = None) -> None:
        self._open: Callable[[str | None], tuple[Any, str]] = writer._open
        self._around = around
        self._stores: list[CountingStore] = []
        writer._open = self._opened  # type: ignore[method-assign]

    def _opened(self, url: str | None) -> tuple[Any, str]:
        store, prefix = self._open(url)
        counting = CountingStore(store if self._around is None else self._around(store))
        self._stores.append(counting)
        return counting, prefix

    @property
    def sent(self) -> int:
        return sum(store.sent for store in self._stores)

    @property
    def calls(self) -> Counter[str]:
        return sum((store.calls for store in self._stores), Counter[str]())


class Refusing:
    """A store of which copies fail."""

    def __init__(self, inner: Any, error: Callable[[], Exception], *, acts: bool = False) -> None:
        self._inner, self._error, self._acts = inner, error, acts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy(self, *args: Any) -> Any:
        if self._acts:
            self._inner.copy(*args)
        raise self._error()


def lora(step: int) -> dict[str, Any]:
    """Mostly frozen weights, and little that each step trains: adapters, their optimizer and numbers."""
    return {
        "model": {
            **{f"layer{number}": filled((MIB // 4,), torch.float32, seed=number) for number in range(2)},
            "adapter": torch.full((2000,), float(step)),
            "scale": torch.tensor(2.5),
        },
        "optim": {"adapter": {"exp_avg": torch.full((2000,), step + 0.5), "step": torch.tensor(step)}},
        "step": step,
        "note": "the same at each save",
    }


def nbytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
