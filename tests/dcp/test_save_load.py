"""Saving and loading in one process, on real servers: what was saved comes back, bit for bit, by either library."""

from __future__ import annotations

import io
import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter

from bucketpoint import BucketReader, BucketWriter, LoadPlanner, UnsafeDataError, latest_checkpoint
from bucketpoint.format.metadata.plain import read_record
from dcp.states import assert_loads, assert_same, varied
from kit import checkpoints
from kit.failures import failure_of
from services import Service

pytestmark = pytest.mark.contract


@pytest.fixture
def root(service: Service) -> str:
    return service.url("run")


@pytest.mark.parametrize("transformed", [False, True])
def test_exchanges_a_whole_training_state_with_the_stock_writer_and_reader(
    service: Service, root: str, tmp_path: Path, transformed: bool
) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    state, extensions = varied(), [ZStandard()] if transformed else None
    writer = service.writer(_extensions=extensions)
    dcp.save(state, checkpoint_id=f"{root}/ours", storage_writer=writer, no_dist=True)
    assert_loads(state, service.reader(), f"{root}/ours")
    for key in service.listed():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(service.read(key))
    assert_loads(state, FileSystemReader(tmp_path / "run" / "ours"))

    stock = FileSystemWriter(tmp_path / "stock", thread_count=2, _extensions=extensions)
    dcp.save(state, storage_writer=stock, no_dist=True)
    for path in (tmp_path / "stock").iterdir():
        service.write(f"run/stock/{path.name}", path.read_bytes())
    assert_loads(state, service.reader(), f"{root}/stock")


def test_accepts_prefixes_with_special_characters(service: Service) -> None:
    # MinIO has no keys with an empty segment; the services have.
    odd = [] if getattr(service.server, "kind", "") == "minio" else ["dou//ble"]
    for name in ("with space", "br[ack]ets", "st*ar", "a+b#c%d", "ünï/中", *odd):
        checkpoints.save(service.url(name), 1.0, service.writer())
        assert checkpoints.load(service.url(name), service.reader()) == 1.0
    assert [key for key in service.listed("dou") if not key.startswith("dou//ble/")] == []
    assert bool(service.listed("dou")) is bool(odd)


def test_writes_two_objects_by_group_and_a_record_readable_without_torch(service: Service, root: str) -> None:
    checkpoints.save(f"{root}/r", 3.0, service.writer())
    groups = {key.rsplit("-", 2)[1] for key in service.listed() if key.endswith(".distcp")}
    assert groups == {"model", "optim", "other"}
    body = service.read("run/r/.bucketpoint.json")
    record = json.loads(body)
    assert record["world_size"] == 1
    assert record["objects"] == 3
    written = service.read("run/r/.metadata")
    rebuilt = read_record(written, metadata_etag=service.etag("run/r/.metadata"))
    assert rebuilt.to_json() == body


def test_takes_a_handful_of_requests_for_thousands_of_small_tensors(service: Service, root: str) -> None:
    count = 3000
    events: list[Any] = []
    writer, reader = service.writer(progress=events.append), service.reader(progress=events.append)
    state = {f"layer.{n}": torch.full((3,), float(n)) for n in range(count)}
    dcp.save(state, checkpoint_id=f"{root}/many", storage_writer=writer, no_dist=True)
    assert len(events) <= 8
    events.clear()
    target = {f"layer.{n}": torch.zeros(3) for n in range(count)}
    dcp.load(target, checkpoint_id=f"{root}/many", storage_reader=reader, no_dist=True)
    assert all(target[f"layer.{n}"].tolist() == [float(n)] * 3 for n in range(count))
    assert len(events) <= 8


def test_lets_a_transform_close_the_stream_that_it_wraps_twice(tmp_path: Any) -> None:
    class Buffered:
        def get_descriptor(self) -> str:
            return "buffered/1"

        def transform_to(self, output: Any) -> Any:
            class Twice(io.BufferedWriter):
                def close(self) -> None:
                    super().close()
                    super().close()

            return Twice(output)

    class Registry:
        def from_descriptor_list(self, descriptors: Any) -> list[Any]:
            return []

    state = {"a": torch.arange(1000.0), "b": torch.arange(7)}
    dcp.save(state, storage_writer=BucketWriter(tmp_path, _extensions=[Buffered()]), no_dist=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, storage_reader=BucketReader(tmp_path, Registry()), no_dist=True)
    assert_same(target, state)


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def test_refuses_byte_items_that_could_run_code_unless_trusted(
    service: Service, root: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="bucketpoint"):
        dcp.save({"bad": Hostile()}, checkpoint_id=f"{root}/h", storage_writer=service.writer(), no_dist=True)
    assert "bad" in caplog.text
    assert "trusted=True" in caplog.text
    reader, trusting = service.reader(f"{root}/h"), service.reader(f"{root}/h", trusted=True)
    error = failure_of(lambda: dcp.load({"bad": None}, storage_reader=reader, no_dist=True))
    assert isinstance(error, UnsafeDataError)
    assert "must never run" not in capsys.readouterr().out
    dcp.load({"bad": None}, storage_reader=trusting, no_dist=True)


def test_ignores_folders_without_a_commit_in_latest_checkpoint(service: Service, root: str) -> None:
    assert latest_checkpoint(root, storage_options=service.options) is None
    for step in (5, 40, 300):
        checkpoints.save(f"{root}/step-{step}", step, service.writer())
    service.write("run/step-900/data/00/x.distcp", b"half")
    assert latest_checkpoint(root, storage_options=service.options) == f"{root}/step-300"


def test_pickles_writer_and_reader_as_configuration_without_secrets(service: Service, root: str) -> None:
    writer = service.writer(f"{root}/pickled")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    again = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.zeros(2)}, storage_writer=again, no_dist=True)
    assert service.secret is None or service.secret not in repr(again)
    assert pickle.loads(pickle.dumps(service.reader(root))).checkpoint_id == root


@pytest.mark.parametrize("step", ["create_local_plan", "finish_plan"])
def test_loads_two_checkpoints_on_two_threads_with_one_reader(tmp_path: Path, step: str) -> None:
    """The load on the other thread runs within this planner's step, between two steps of the reader."""
    one, two, other = f"{tmp_path}/1", f"{tmp_path}/2", []
    for value, url in enumerate((one, two), 1):
        checkpoints.save(url, value)
    reader, planner, target = BucketReader(), LoadPlanner(), checkpoints.state_of(0)
    planned = getattr(planner, step)

    def interrupted(*args: Any) -> Any:
        thread = threading.Thread(target=lambda: other.append((checkpoints.load(two, reader), reader.url)))
        thread.start()
        thread.join()
        return planned(*args)

    setattr(planner, step, interrupted)
    dcp.load(target, checkpoint_id=one, storage_reader=reader, planner=planner, no_dist=True)
    assert_same(target, checkpoints.state_of(1))
    assert (other, reader.url) == ([(2.0, two)], one)


class TakesNoMeta(DefaultSavePlanner):
    """A planner of the first versions of DCP, for which DCP does not call the writer's `storage_meta`."""

    def set_up_planner(self, state_dict: dict[str, Any], is_coordinator: bool = False) -> None:  # type: ignore[override]
        super().set_up_planner(state_dict, None, is_coordinator)


@pytest.mark.filterwarnings("ignore:The function definition for SavePlanner")
def test_writes_objects_of_its_own_for_each_save_without_storage_meta(tmp_path: Path) -> None:
    writer = BucketWriter(f"file://{tmp_path}/run", progress=False)
    tokens = []
    for fill in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), fill)}, storage_writer=writer, planner=TakesNoMeta(), no_dist=True)
        loaded = {"w": torch.zeros(3)}
        dcp.load(loaded, storage_reader=BucketReader(f"file://{tmp_path}/run"), no_dist=True)
        assert torch.equal(loaded["w"], torch.full((3,), fill))
        tokens.append({path.name for path in (tmp_path / "run" / "data").rglob("*.distcp")})
    assert tokens[0].isdisjoint(tokens[1])
