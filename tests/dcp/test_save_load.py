"""Saving and loading in one process, on real servers: what was saved comes back, bit for bit, by either library."""

from __future__ import annotations

import io
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter

from bucketpoint import BucketReader, BucketWriter, CorruptDataError, UnsafeDataError, latest_checkpoint
from bucketpoint.format.metadata.plain import read_record
from dcp.states import DTYPES, assert_loads, assert_same, blank, filled, same_bits, varied  # noqa: F401
from services import Service

pytestmark = pytest.mark.contract


@pytest.fixture
def writer(service: Service) -> BucketWriter:
    return service.writer()


@pytest.fixture
def reader(service: Service) -> BucketReader:
    return service.reader()


@pytest.fixture
def root(service: Service) -> str:
    return service.url("run")


def download(service: Service, folder: Any, prefix: str) -> None:
    for key in service.listed():
        path = folder / key.removeprefix(prefix + "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(service.read(key))


def test_loads_a_whole_training_state_by_our_reader_and_the_stock_one(
    writer: BucketWriter, reader: BucketReader, service: Service, root: str, tmp_path: Any
) -> None:
    state = varied()
    dcp.save(state, checkpoint_id=f"{root}/step-1", storage_writer=writer, no_dist=True)
    assert_loads(state, reader, f"{root}/step-1")
    download(service, tmp_path, "run/step-1")
    assert_loads(state, FileSystemReader(tmp_path))


def test_loads_what_the_stock_writer_wrote(reader: BucketReader, service: Service, root: str, tmp_path: Any) -> None:
    state = varied()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    for path in tmp_path.iterdir():
        service.write(f"run/stock/{path.name}", path.read_bytes())
    assert_loads(state, reader, f"{root}/stock")


@pytest.mark.parametrize("name", ["with space", "br[ack]ets", "st*ar", "a+b#c%d", "ünï/中"])
def test_accepts_prefixes_with_special_characters(
    writer: BucketWriter, reader: BucketReader, root: str, name: str
) -> None:
    state = {"w": torch.arange(10.0)}
    dcp.save(state, checkpoint_id=f"{root}/{name}", storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(10)}
    dcp.load(target, checkpoint_id=f"{root}/{name}", storage_reader=reader, no_dist=True)
    assert torch.equal(target["w"], state["w"])


@pytest.mark.parametrize("name", ["moto", "gcs"])
def test_keeps_a_prefix_with_an_empty_segment_as_it_is(name: str, request: pytest.FixtureRequest) -> None:
    # MinIO has no such keys; the services have.
    service = Service.on(request.getfixturevalue(name))
    url = service.url("dou//ble")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=url, storage_writer=service.writer(), no_dist=True)
    assert all(key.startswith("dou//ble/") for key in service.listed())
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=url, storage_reader=service.reader(), no_dist=True)
    assert target["w"].tolist() == [1.0] * 3


def test_separates_model_and_optimizer_into_two_objects(writer: BucketWriter, service: Service, root: str) -> None:
    state = {"app": {"model": {"w": torch.ones(4)}, "optim": {"state": {"w": {"exp_avg": torch.ones(4)}}}}}
    dcp.save(state, checkpoint_id=f"{root}/g", storage_writer=writer, no_dist=True)
    groups = {key.rsplit("-", 2)[1] for key in service.listed() if key.endswith(".distcp")}
    assert groups == {"model", "optim"}


def test_writes_a_record_readable_without_torch_beside_the_metadata(
    writer: BucketWriter, service: Service, root: str
) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{root}/r", storage_writer=writer, no_dist=True)
    body = service.read("run/r/.bucketpoint.json")
    record = json.loads(body)
    assert record["world_size"] == 1
    assert record["objects"] == 1
    written = service.read("run/r/.metadata")
    rebuilt = read_record(written, metadata_etag=service.etag("run/r/.metadata"))
    assert rebuilt.to_json() == body


def test_takes_a_handful_of_requests_for_ten_thousand_small_tensors(
    writer: BucketWriter, root: str, service: Service
) -> None:
    state = {f"layer.{n}": torch.full((3,), float(n)) for n in range(10_000)}
    events: list[Any] = []
    writer.progress = events.append
    dcp.save(state, checkpoint_id=f"{root}/many", storage_writer=writer, no_dist=True)
    assert len(events) <= 8
    reader = service.reader(progress=events.append)
    events.clear()
    target = {f"layer.{n}": torch.zeros(3) for n in range(10_000)}
    dcp.load(target, checkpoint_id=f"{root}/many", storage_reader=reader, no_dist=True)
    assert all(target[f"layer.{n}"].tolist() == [float(n)] * 3 for n in range(10_000))
    assert len(events) <= 8


def test_applies_a_transform_both_ways(service: Service, root: str, tmp_path: Any) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    state = varied()
    ours = service.writer(_extensions=[ZStandard()])
    dcp.save(state, checkpoint_id=f"{root}/z", storage_writer=ours, no_dist=True)
    assert_loads(state, service.reader(), f"{root}/z")

    download(service, tmp_path, "run/z")
    assert_loads(state, FileSystemReader(tmp_path))

    stock = tmp_path / "stock"
    dcp.save(state, storage_writer=FileSystemWriter(stock, _extensions=[ZStandard()]), no_dist=True)
    for path in stock.iterdir():
        service.write(f"run/zs/{path.name}", path.read_bytes())
    assert_loads(state, service.reader(), f"{root}/zs")


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


def test_finds_and_names_a_flipped_byte(
    writer: BucketWriter, reader: BucketReader, service: Service, root: str
) -> None:
    dcp.save({"model": {"w": torch.ones(100_000)}}, checkpoint_id=f"{root}/x", storage_writer=writer, no_dist=True)
    key = next(key for key in service.listed() if key.endswith(".distcp"))
    body = bytearray(service.read(key))
    body[200_000] ^= 1
    # Under another prefix, where the ETags of the original are not insisted on: the checksum alone has to find it.
    for name in service.listed():
        data = bytes(body) if name == key else service.read(name)
        service.write(name.replace("run/x", "run/copy"), data)
    with pytest.raises(dcp.CheckpointException) as caught:
        target = {"model": {"w": torch.zeros(100_000)}}
        dcp.load(target, checkpoint_id=f"{root}/copy", storage_reader=reader, no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, CorruptDataError)
    assert "model.w" in str(error)


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def test_refuses_byte_items_that_could_run_code_unless_trusted(
    writer: BucketWriter,
    service: Service,
    root: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.WARNING, logger="bucketpoint"):
        dcp.save({"bad": Hostile()}, checkpoint_id=f"{root}/h", storage_writer=writer, no_dist=True)
    assert "bad" in caplog.text
    assert "trusted=True" in caplog.text
    with pytest.raises(dcp.CheckpointException) as caught:
        reader = service.reader()
        dcp.load({"bad": None}, checkpoint_id=f"{root}/h", storage_reader=reader, no_dist=True)
    assert isinstance(caught.value.failures[0][0], UnsafeDataError)
    assert "must never run" not in capsys.readouterr().out
    reader = service.reader(trusted=True)
    dcp.load({"bad": None}, checkpoint_id=f"{root}/h", storage_reader=reader, no_dist=True)


def test_ignores_folders_without_a_commit_in_latest_checkpoint(
    writer: BucketWriter, service: Service, root: str
) -> None:
    assert latest_checkpoint(root, storage_options=service.options) is None
    for step in (5, 40, 300):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/step-{step}", storage_writer=writer, no_dist=True)
    service.write("run/step-900/data/00/x.distcp", b"half")
    assert latest_checkpoint(root, storage_options=service.options) == f"{root}/step-300"


def test_pickles_writer_and_reader_as_configuration_without_secrets(service: Service, root: str) -> None:
    writer = service.writer(f"{root}/pickled")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    again = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.zeros(2)}, storage_writer=again, no_dist=True)
    assert service.secret is None or service.secret not in repr(again)
    assert pickle.loads(pickle.dumps(service.reader(root))).checkpoint_id == root


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
