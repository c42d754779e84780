"""The .metadata pickle: read by stock torch of every version, and no pickle but DCP metadata read by ours."""

from __future__ import annotations

import copyreg
import io
import math
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.errors import MetadataError, UnsafeDataError
from bucketpoint.format import keys
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.metadata.plain import read_record
from bucketpoint.format.pickles.metadata_vocabulary import PROTOCOL, trailer
from bucketpoint.format.storage_info import make_storage_info
from kit.metadata import tensor_entry

pytestmark = pytest.mark.contract

OBJECTS = {keys.data_path("0123456789ab", 0, "model", 0): {"size": 5000, "etag": "abc"}}
FACTS = {"token": "0123456789ab", "world_size": 2, "created": 1.5e9, "torch": "2.15.0", "objects": OBJECTS}


def example(chunks: int = 2, checkpoint_id: Any = "s3://bucket/run/step-5") -> Metadata:
    entries: dict[str, Any] = {"step": BytesStorageMetadata()}
    items: dict[Any, Any] = {MetadataIndex("step"): make_storage_info(next(iter(OBJECTS)), 0, 400, crc32c=3)}
    for number, dtype in enumerate([torch.bfloat16, torch.float32, torch.uint16, torch.float8_e4m3fn]):
        # Names are built anew each time, as when they come from other ranks.
        name = f"app.model.layers.{number}.weight"
        entries[name] = tensor_entry((chunks * 4, 3), [((4 * n, 0), (4, 3)) for n in range(chunks)], dtype)
        for n in range(chunks):
            items[MetadataIndex(f"app.model.layers.{number}.weight", torch.Size((4 * n, 0)), n)] = make_storage_info(
                str(next(iter(OBJECTS))), 400 + n, 800, payload_offset=384, payload_nbytes=48, crc32c=n
            )
    mapping = {name: tuple(name.split(".")) for name in entries}
    return Metadata(entries, mapping, items, StorageMeta(checkpoint_id, "save", None, ["m"]), "1.0.0")


def test_unpickles_equal_metadata_by_stock_and_by_ours_and_leaves_the_callers_alone() -> None:
    metadata = example()
    data = encode_metadata(metadata, bucketpoint=FACTS)
    assert metadata == example()
    assert not hasattr(metadata, "bucketpoint")
    assert pickle.loads(data) == example()
    assert decode_metadata(data) == example()
    assert {**extra(decode_metadata(data)), **FACTS} == extra(decode_metadata(data))


def test_writes_the_five_tensor_properties_that_every_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = TensorProperties.__setstate__

    def setstate(self: TensorProperties, state: Any) -> None:
        seen.append(len(state))
        original(self, state)

    data = encode_metadata(example(), bucketpoint=FACTS)
    monkeypatch.setattr(TensorProperties, "__setstate__", setstate)
    pickle.loads(data)
    assert set(seen) == {5}


def test_reads_tensor_properties_with_six_fields_on_every_torch() -> None:
    def six(value: TensorProperties) -> Any:
        return copyreg.__newobj__, (TensorProperties,), (*value.__getstate__()[:5], (3, 1))

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: six}
    pickler.dump(example())
    found = decode_metadata(stream.getvalue())
    expected = example()
    for entry in expected.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata) and hasattr(entry.properties, "strides"):
            entry.properties.strides = (3, 1)
    assert found == expected


def test_pickles_equal_names_paths_and_sizes_once() -> None:
    few, many = (len(encode_metadata(example(chunks), bucketpoint=FACTS)) for chunks in (10, 1010))
    assert (many - few) / 4000 < 160  # a chunk, its index and its place
    assert encode_metadata(example(), bucketpoint=FACTS).count(b"app.model.layers.0.weight") == 1


def test_stores_a_path_as_checkpoint_id_as_text() -> None:
    data = encode_metadata(example(checkpoint_id=Path("/x/step-5")), bucketpoint=FACTS)
    meta = decode_metadata(data).storage_meta
    assert meta.checkpoint_id == str(Path("/x/step-5"))
    assert b"pathlib" not in data


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_reads_stock_pickles_of_each_protocol_and_what_older_files_lack(protocol: int) -> None:
    metadata = example(checkpoint_id=Path("/x"))
    assert decode_metadata(pickle.dumps(metadata, protocol)) == metadata
    metadata.planner_data = OrderedDict(metadata.planner_data)
    assert decode_metadata(pickle.dumps(metadata, protocol)) == metadata
    del vars(metadata)["storage_meta"], vars(metadata)["version"]
    found = decode_metadata(pickle.dumps(metadata, protocol))
    assert (found.storage_meta, found.version) == (None, None)


def test_reads_what_filesystem_writer_writes(tmp_path: Path) -> None:
    state = {"app": {"w": torch.ones(3, 4), "n": 5, "deep": [1, {"x": torch.ones(())}]}, "none": None}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert decode_metadata(data) == pickle.loads(data)
    assert extra(decode_metadata(data)) == {}
    record = read_record(data)
    assert record.token is None
    assert record.groups == {}
    assert (record.tensors, record.objects) == (2, len(list(tmp_path.glob("*.distcp"))))
    assert record.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))


def test_reads_paths_of_other_pythons_and_systems() -> None:
    data = pickle.dumps(example(checkpoint_id=pathlib.PurePosixPath("/x")), 2)
    data = data.replace(b"cpathlib._local\n", b"cpathlib\n")
    for module in (b"cpathlib\n", b"cpathlib._local\n"):
        for name in (b"PosixPath\n", b"WindowsPath\n"):
            changed = data.replace(b"cpathlib\nPurePosixPath\n", module + name)
            meta = decode_metadata(changed).storage_meta
            assert isinstance(meta.checkpoint_id, pathlib.PurePath)


def test_reads_the_enum_pickles_of_python_3_11_0_and_no_other_getattr() -> None:
    class Enums(pickle._Pickler):  # type: ignore[name-defined,misc]
        dispatch_table: ClassVar[dict[type, Any]] = {
            **copyreg.dispatch_table,
            _MEM_FORMAT_ENCODING: lambda member: (getattr, (_MEM_FORMAT_ENCODING, member.name)),
            StorageMeta: lambda meta: (getattr, (Metadata, "__init__")),
        }

    stream = io.BytesIO()
    metadata = example()
    metadata.storage_meta = None
    Enums(stream, 4).dump(metadata)
    assert decode_metadata(stream.getvalue()) == metadata
    stream = io.BytesIO()
    Enums(stream, 4).dump(example())
    with pytest.raises(MetadataError):
        decode_metadata(stream.getvalue())


def test_rebuilds_a_record_equal_to_the_written_one() -> None:
    data = encode_metadata(example(), bucketpoint=FACTS)
    record = read_record(data, metadata_etag="e")
    assert read_record(data, metadata_etag="e") == record
    assert type(record).from_json(record.to_json()) == record
    assert (record.token, record.created, record.world_size) == ("0123456789ab", 1.5e9, 2)
    assert (record.bytes, record.objects, record.items, record.tensors) == (5000, 1, 9, 4)
    assert record.groups == {"model": 5000}


# What is refused


@pytest.mark.parametrize(
    "kind", [Metadata, MetadataIndex, _StorageInfo, TensorProperties, _MEM_FORMAT_ENCODING, StorageMeta]
)
def test_lets_a_pickle_change_no_class_that_it_names(kind: type) -> None:
    before = dict(vars(kind))
    # BUILD with (None, attributes) sets attributes on whatever lies below: here the class itself.
    body = b"\x80\x02c" + f"{kind.__module__}\n{kind.__name__}\n".encode() + b"(N}(X\x05\x00\x00\x00pwnedK\x01utb."
    with pytest.raises(MetadataError):
        decode_metadata(body)
    assert dict(vars(kind)) == before
    if kind is _StorageInfo:
        pickle.loads(body)
        assert vars(kind)["pwned"] == 1, "the pickle was harmless and the test shows nothing"
        del kind.pwned  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [None, {}, [], 5, "x", {"state_dict_metadata": {}}, torch.Size((1,))], ids=repr)
def test_refuses_pickles_of_other_things(value: Any) -> None:
    with pytest.raises(MetadataError):
        decode_metadata(pickle.dumps(value))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("data", [b"", b"<html>", b"\x80\x04", b"PK\x03\x04", b"{}", b"\0" * 100])
def test_refuses_bytes_that_are_no_pickle(data: bytes, trusted: bool) -> None:
    with pytest.raises(MetadataError):
        decode_metadata(data, trusted=trusted, url="s3://b/x")


WHOLE = encode_metadata(example(), bucketpoint=FACTS)


PICKLED = WHOLE[: -len(trailer(0))]


@given(st.integers(0, len(WHOLE) - 1).filter(lambda size: size != len(PICKLED)))
def test_refuses_truncated_metadata(size: int) -> None:
    with pytest.raises(MetadataError):
        decode_metadata(WHOLE[:size])


@pytest.mark.parametrize("trusted", [False, True])
def test_refuses_a_flipped_bit_at_any_place(trusted: bool) -> None:
    for at in range(len(WHOLE)):
        flipped = bytearray(WHOLE)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(MetadataError):
            decode_metadata(bytes(flipped), trusted=trusted)


@pytest.mark.parametrize("trusted", [False, True])
def test_reads_metadata_without_a_trailer_as_0_2_writes_it(trusted: bool) -> None:
    assert PICKLED.endswith(pickle.STOP)
    assert decode_metadata(PICKLED, trusted=trusted) == decode_metadata(WHOLE)


def corrupted(change: Any) -> bytes:
    metadata = example()
    change(metadata)
    return pickle.dumps(metadata)


def tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["app.model.layers.0.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "state_dict_metadata", None),
        lambda m: setattr(m, "storage_data", [1]),
        lambda m: m.storage_data.update({"x": 1}),
        lambda m: m.storage_data.update({MetadataIndex("x"): BytesStorageMetadata()}),
        lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}),
        lambda m: m.state_dict_metadata.update({"x": "y"}),
        lambda m: setattr(m, "storage_meta", "x"),
        lambda m: setattr(tensor(m), "properties", None),
        lambda m: setattr(tensor(m), "size", None),
        lambda m: setattr(tensor(m), "size", torch.Size((1 << 40, 1 << 40))),
        lambda m: setattr(tensor(m), "chunks", [BytesStorageMetadata()]),
        lambda m: setattr(tensor(m).chunks[0], "sizes", torch.Size((9, 9))),
        lambda m: setattr(tensor(m).chunks[0], "offsets", torch.Size((-1, 0))),
        lambda m: setattr(tensor(m).chunks[0], "offsets", torch.Size((0,))),
    ],
)
def test_refuses_metadata_with_impossible_content(change: Any) -> None:
    with pytest.raises(MetadataError):
        decode_metadata(corrupted(change))


@pytest.mark.parametrize(
    "facts",
    [
        {"format": 2},
        {"format": "1"},
        {"objects": [1]},
        {"objects": {"x": 5}},
        {"objects": {"x": {"size": -1}}},
        {"objects": {"x": {"size": 1, "etag": 3}}},
        *({name: value} for name in ("created", "seconds") for value in (-1.0, math.nan, math.inf, "1")),
    ],
    ids=str,
)
def test_checks_bucketpoints_own_part_too(facts: dict[str, Any]) -> None:
    data = encode_metadata(example(), bucketpoint=facts)
    with pytest.raises(MetadataError):
        extra(decode_metadata(data))


def test_writes_only_plain_values_into_bucketpoints_own_part() -> None:
    with pytest.raises(MetadataError):
        encode_metadata(example(), bucketpoint={"x": torch.Size((1,))})


class PlannersOwn:
    def __eq__(self, other: object) -> bool:
        return type(other) is PlannersOwn

    __hash__ = None  # type: ignore[assignment]


def test_reads_a_planners_own_classes_only_when_trusted() -> None:
    metadata = example()
    metadata.planner_data = PlannersOwn()
    data = encode_metadata(metadata, bucketpoint=FACTS)
    with pytest.raises(UnsafeDataError, match="PlannersOwn"):
        decode_metadata(data)
    assert decode_metadata(data, trusted=True) == metadata
