"""The index beside `.metadata`: it says the same, entry by entry, or is not written; damaged ones are refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import pickle
import random
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from bucketpoint.errors import MetadataError
from bucketpoint.format import keys
from bucketpoint.format.index.decode import HEAD
from bucketpoint.format.index.encode import encode_index, make_index
from bucketpoint.format.index.int_columns import Decoder, Segments, UnsuitableError, encode, encode_segments
from bucketpoint.format.index.ref import INDEX_ATTRIBUTE, MAGIC, find_ref, index_path, is_index, make_ref, ref_of
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata, extension
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.pickles.metadata_vocabulary import trailer
from bucketpoint.format.storage_info import Columns, make_storage_info, pack
from format.metadata.test_template import index_columns
from kit.metadata import tensor_entry

pytestmark = pytest.mark.contract

TOKEN = "0123456789ab"
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64]


def tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# Columns of numbers


def test_takes_no_bytes_for_values_of_progressions_and_none_that_are_too_far_apart() -> None:
    segments = Segments.of(tensor([10_000, 7, 10_000]))
    values = torch.cat([torch.arange(10_000) * 3, torch.arange(7) * 5, (1 << 40) - torch.arange(10_000)])
    values[9_999] -= 2
    assert len(encode_segments(values, segments)) < 150
    with pytest.raises(UnsuitableError):
        encode(tensor([1 << 62, -(1 << 62)]))


@given(st.binary(max_size=80), st.integers(0, 50), st.booleans())
def test_refuses_garbage_as_a_column(data: bytes, count: int, in_segments: bool) -> None:
    decoder = Decoder(data)
    try:
        found = decoder.segmented(Segments.of(tensor([count, count]))) if in_segments else decoder.column(2 * count)
    except MetadataError:
        return
    assert len(found) == 2 * count


# Metadata


def rows(counts: list[int], width: int) -> tuple[tuple[int, ...], list[Any]]:
    chunks, at = [], 0
    for count in counts:
        chunks.append(((at, 0), (count, width)))
        at += count
    return (at, width), chunks


@st.composite
def tensors(draw: Any) -> tuple[tuple[int, ...], list[Any]]:
    """A shape, and offsets and sizes of chunks that lie in it."""
    kind = draw(st.sampled_from(["whole", "rows", "uneven", "grid", "boxes", "none"]))
    if kind in ("whole", "none"):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        return shape, [((0,) * len(shape), shape)] if kind == "whole" else []
    if kind == "rows":
        return rows([draw(st.integers(1, 9))] * draw(st.integers(1, 12)) + [draw(st.integers(1, 9))], 5)
    if kind == "uneven":
        return rows(draw(st.lists(st.integers(1, 1000), min_size=1, max_size=12)), draw(st.integers(0, 70000)))
    if kind == "grid":
        (high, wide), (down, across) = (draw(st.tuples(st.integers(1, 5), st.integers(1, 5))) for _ in range(2))
        boxes = [((high * y, wide * x), (high, wide)) for y in range(down) for x in range(across)]
        return (high * down, wide * across), boxes
    shape = tuple(draw(st.lists(st.integers(1, 50), min_size=1, max_size=3)))
    boxes, room = {}, math.prod(shape)
    for _ in range(draw(st.integers(1, 6))):
        offset = tuple(draw(st.integers(0, size)) for size in shape)
        box = tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, offset, strict=True))
        if offset not in boxes and math.prod(box) <= room:
            boxes[offset], room = box, room - math.prod(box)
    return shape, list(boxes.items())


NAMES = st.text(max_size=12) | st.sampled_from(["a.b.c", "a.b.d", "layers.0.w", "layers.1.w", "\ud800", ""])


@st.composite
def metadatas(draw: Any) -> tuple[Metadata, dict[str, Any]]:
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=8))
    seed = random.Random(draw(st.integers(0, 1 << 30)))
    entries: dict[str, Any] = {}
    wanted: list[tuple[MetadataIndex, int | None]] = []
    for name in names:
        if draw(st.integers(0, 3)) == 0:
            entries[name] = BytesStorageMetadata()
            wanted.append((MetadataIndex(name), None))
            continue
        dtype = draw(st.sampled_from(DTYPES))
        shape, chunks = draw(tensors())
        entries[name] = tensor_entry(shape, chunks, dtype, requires_grad=draw(st.booleans()))
        for number, (offset, size) in enumerate(chunks):
            hint = draw(st.sampled_from([number, None, 3]))
            wanted.append((MetadataIndex(name, torch.Size(offset), hint), math.prod(size) * dtype.itemsize))
    if draw(st.booleans()):
        seed.shuffle(wanted)
    paths = [keys.data_path(TOKEN, rank, "model", 0) for rank in range(draw(st.integers(1, 4)))]
    transforms = draw(st.sampled_from([None, None, ["stream.zstd/1"]]))
    ends = dict.fromkeys(paths, 0)
    items: dict[Any, Any] = {}
    tabled, with_tables = draw(st.booleans()), []
    for at, (index, nbytes) in enumerate(wanted):
        path = paths[at % len(paths)] if draw(st.booleans()) else seed.choice(paths)
        framed = nbytes is not None and draw(st.integers(0, 4)) > 0
        length = (nbytes or 0) + draw(st.sampled_from([400, 404, 90]))
        checked = nbytes if framed else length
        assert checked is not None
        block = max(checked // draw(st.integers(1, 4)), 1)
        blocks = -(-checked // block)
        ends[path] += draw(st.sampled_from([0, 0, 64]))
        make = functools.partial(
            make_storage_info,
            path, ends[path], length, payload_offset=64 if framed else None, payload_nbytes=nbytes if framed else None,
            crc32c=seed.getrandbits(32), block_nbytes=block, transform_descriptors=transforms,
        )  # fmt: skip
        ends[path] += length
        items[index] = make()
        if tabled and blocks > 1:
            with_tables.append((index, path, 4 * blocks, make))
    for index, path, size, make in with_tables:
        ends[path] += draw(st.sampled_from([0, 0, 0, 12]))
        items[index] = make(table_offset=ends[path])
        ends[path] += size
    mapping: Any = {name: tuple(name.split(".")) for name in names}
    mapping = draw(st.sampled_from([None, mapping, dict(reversed(list(mapping.items()))), {"x": (1, "y", ())[:2]}]))
    meta = draw(st.sampled_from([None, StorageMeta("s3://b/x", "save", None, ["m"]), StorageMeta(Path("/x"))]))
    objects = {path: {"size": end, "etag": draw(st.sampled_from([None, "e"]))} for path, end in ends.items()}
    if draw(st.booleans()):
        objects["extra"] = objects.pop(paths[-1])
    facts = {"token": TOKEN, "created": 1.5e9, "endpoint": "é", "world_size": None, "objects": objects}
    return Metadata(entries, mapping, items, meta, draw(st.sampled_from([None, "1.0.0"]))), facts


def both(metadata: Metadata, facts: dict[str, Any]) -> tuple[Metadata, Metadata]:
    """The metadata as it comes out of its index, and out of its pickle."""
    return decode_index(index_of(metadata, facts)), decode_metadata(encode_metadata(metadata, bucketpoint=facts))


def assert_equal(indexed: Metadata, stock: Metadata) -> None:
    assert type(indexed) is Metadata
    assert indexed == stock
    assert stock == indexed
    assert extra(indexed) == extra(stock)
    assert list(indexed.state_dict_metadata) == list(stock.state_dict_metadata)
    for fqn, entry in stock.state_dict_metadata.items():
        found = indexed.state_dict_metadata[fqn]
        assert found == entry
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(found, TensorStorageMetadata)
            assert list(found.chunks) == entry.chunks
            assert found.properties.__getstate__() == entry.properties.__getstate__()
    assert {index: index.index for index in indexed.storage_data} == {
        index: index.index for index in stock.storage_data
    }
    for index, info in stock.storage_data.items():
        for hint in (index.index, None, 0, -5, 1000):
            found = vars(indexed.storage_data[dataclasses.replace(index, index=hint)])
            assert found == {name: value for name, value in vars(info).items() if value is not None}
    if stock.planner_data is not None:
        assert {name: indexed.planner_data[name] for name in stock.planner_data} == stock.planner_data


@settings(max_examples=60)
@given(metadatas(), st.integers(1, 3))
def test_says_in_an_index_and_in_one_of_what_ranks_report_what_the_metadata_says(
    case: tuple[Metadata, dict[str, Any]], ranks: int
) -> None:
    metadata, facts = case
    hypothesis.assume(metadata.storage_data)
    # Each object is one rank's.
    paths = list(dict.fromkeys(info.relative_path for info in metadata.storage_data.values()))
    mine: list[dict[Any, Any]] = [{} for _ in range(ranks)]
    for index, info in metadata.storage_data.items():
        mine[paths.index(info.relative_path) % ranks][index] = info
    whole = dataclasses.replace(metadata, storage_data={index: info for one in mine for index, info in one.items()})
    indexed, stock = both(whole, facts)
    assert_equal(indexed, stock)
    reported = [pack(list(one.values())) for one in mine]
    items = index_columns([list(one) for one in mine])
    known = [one for one in reported if one is not None]
    assert len(known) == ranks
    # Of an earlier save: other names of the objects, and other checksums.
    earlier = [
        Columns(one.layout, tuple([(path.upper(), *fact) for path, *fact in one.objects]), bytes(len(one.checksums)))
        for one in known
    ]
    template = make_index(dataclasses.replace(metadata, storage_data=None), items, earlier)
    assert template is not None
    checksums, paths = b"".join(one.checksums for one in known), [path for one in known for path, _, _ in one.objects]
    told = {
        "bucketpoint": extension(facts)["bucketpoint"],
        "storage_meta": metadata.storage_meta,
        "version": metadata.version,
    }
    made = template.fill(checksums, paths, **told)
    assert made is not None
    assert_equal(decode_index(made), stock)
    assert template.fill(checksums[4:], paths, **told) is None
    assert template.fill(checksums, paths[1:], **told) is None


def example(ranks: int = 4) -> tuple[Metadata, dict[str, Any]]:
    entries: dict[str, Any] = {"step": BytesStorageMetadata()}
    items: dict[Any, Any] = {}
    for number, name in enumerate(["model.a", "model.b", "optim.a"]):
        entries[name] = tensor_entry(*rows([8] * ranks, 4))
        for rank, box in enumerate(entries[name].chunks):
            items[MetadataIndex(name, box.offsets, rank)] = make_storage_info(
                keys.data_path(TOKEN, rank, "model", 0), 500 * number, 500, payload_offset=64, payload_nbytes=128,
                crc32c=rank + number, block_nbytes=64, table_offset=1500 + 8 * number,
            )  # fmt: skip
    items[MetadataIndex("step")] = make_storage_info(keys.data_path(TOKEN, 0, "other", 0), 0, 77, crc32c=5)
    objects = {info.relative_path: {"size": 1500, "etag": "e"} for info in items.values()}
    mapping = {name: tuple(name.split(".")) for name in entries}
    return Metadata(entries, mapping, items, StorageMeta("s3://b/x", TOKEN), "1.0.0"), {"objects": objects}


def index_of(metadata: Metadata, facts: dict[str, Any]) -> bytes:
    encoded = encode_index(metadata, bucketpoint=extension(facts)["bucketpoint"])
    assert encoded is not None
    return encoded


def test_pickles_copies_and_encodes_metadata_from_an_index_as_stock_readers_expect() -> None:
    metadata, facts = example(64)
    indexed, stock = both(metadata, facts)
    assert_equal(pickle.loads(pickle.dumps(indexed)), stock)
    assert_equal(copy.deepcopy(indexed), stock)
    assert len(pickle.dumps(indexed)) < len(pickle.dumps(stock)) / 3
    entry = indexed.state_dict_metadata["model.a"]
    assert type(pickle.loads(pickle.dumps(entry)).chunks) is list
    again = pickle.loads(encode_metadata(indexed, bucketpoint=facts))
    assert type(again.state_dict_metadata) is dict
    assert type(again.storage_data) is dict
    assert type(again.planner_data) is dict
    assert again == metadata
    assert type(again.state_dict_metadata["model.a"].chunks) is list


@pytest.mark.parametrize(
    "key",
    [
        "absent",
        MetadataIndex("absent"),
        MetadataIndex("model.a"),
        MetadataIndex("step", (0,)),
        MetadataIndex("model.a", (1, 0)),
        MetadataIndex("model.a", (8,), 1),
    ],
    ids=str,
)
def test_finds_nothing_that_is_not_in_it(key: Any) -> None:
    indexed, _ = both(*example())
    assert key not in indexed.storage_data
    assert "absent" not in indexed.state_dict_metadata
    with pytest.raises(KeyError):
        indexed.storage_data[key]
    with pytest.raises(KeyError):
        indexed.state_dict_metadata["absent"]


def test_takes_little_more_than_checksums_for_chunks_of_a_regular_layout() -> None:
    few, more = (len(index_of(*example(ranks))) for ranks in (1000, 3000))
    # Of each rank there are three chunks with a checksum of 4 bytes each, and one object.
    assert (more - few) / 2000 < 3 * 4 + 25


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.storage_data.popitem(),
        lambda m: m.storage_data.update({MetadataIndex("x"): next(iter(m.storage_data.values()))}),
        lambda m: setattr(m, "planner_data", {"a": ["b"]}),
        lambda m: setattr(m, "planner_data", {"a": (True,)}),
        lambda m: setattr(m, "planner_data", [1]),
        lambda m: setattr(m, "storage_data", None),
        lambda m: setattr(m, "more", 1),
        lambda m: delattr(next(iter(m.storage_data.values())), "bp_crc"),
        lambda m: setattr(next(iter(m.storage_data.values())), "other", 1),
        lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["x"]),
        lambda m: delattr(next(iter(m.storage_data.values())), "bp_to"),
        lambda m: setattr(m.state_dict_metadata["model.a"], "size", (32, 4)),
        lambda m: m.state_dict_metadata["model.a"].chunks.append(m.state_dict_metadata["model.a"].chunks[0]),
        lambda m: m.state_dict_metadata.update(x="y"),
    ],
)
def test_makes_no_index_of_what_it_cannot_tell(change: Any) -> None:
    metadata, facts = example()
    change(metadata)
    assert encode_index(metadata, bucketpoint=extension(facts)["bucketpoint"]) is None


def test_makes_no_index_of_a_dtype_that_safe_readers_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, facts = example()
    monkeypatch.setattr("bucketpoint.format.index.encode.DTYPE_NAMES", ("int8",))
    assert encode_index(metadata, bucketpoint=extension(facts)["bucketpoint"]) is None


def test_makes_no_index_of_facts_that_json_would_alter() -> None:
    metadata, facts = example()
    assert encode_index(metadata, bucketpoint={**facts, "sizes": (1, 2)}) is None
    assert encode_index(metadata, bucketpoint={**facts, "objects": {"x": {"size": 1, "etag": None, "more": 1}}}) is None


def test_reads_an_index_under_another_default_device() -> None:
    with torch.device("meta"):
        assert_equal(*both(*example()))


# What is refused

WHOLE = index_of(*example())


@given(st.integers(0, len(WHOLE) - 1))
def test_refuses_a_truncated_index(size: int) -> None:
    with pytest.raises(MetadataError):
        decode_index(WHOLE[:size], url="s3://b/x")


def parts() -> list[bytes]:
    _, _, *sizes = HEAD.unpack_from(WHOLE)
    found, at = [], HEAD.size
    for size in sizes[::2]:
        found.append(WHOLE[at : at + size])
        at += size
    return found


def put_together(changed: dict[int, bytes], real: dict[int, int] | None = None, items: int | None = None) -> bytes:
    _, count, *sizes = HEAD.unpack_from(WHOLE)
    new = [changed.get(number, part) for number, part in enumerate(parts())]
    lengths = [number for at, part in enumerate(new) for number in (len(part), (real or {}).get(at, sizes[2 * at + 1]))]
    return HEAD.pack(MAGIC, count if items is None else items, *lengths) + b"".join(new)


COLUMNS = zlib.decompress(parts()[2])


@given(st.lists(st.tuples(st.integers(0, len(COLUMNS) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_refuses_damaged_columns_or_names_what_is_there(damage: list[tuple[int, int]]) -> None:
    data = bytearray(COLUMNS)
    for position, value in damage:
        data[position] = value
    try:
        found = decode_index(put_together({2: zlib.compress(data)}))
    except MetadataError:
        return
    for index, info in found.storage_data.items():
        assert info.offset >= 0
        assert info.length >= 0
        assert info.relative_path in extra(found)["objects"]
        entry = found.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                for at, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True):
                    assert 0 <= at <= at + size <= whole


@pytest.mark.parametrize("number", range(4))
def test_refuses_a_part_that_outgrows_its_stated_size_before_it_is_allocated(number: int) -> None:
    bomb = zlib.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        for real in ({}, {number: 64 << 20}, {number: 1 << 62}):
            with pytest.raises(MetadataError):
                decode_index(put_together({number: bomb}, real))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * (len(WHOLE) + len(bomb)) + (4 << 20)


@pytest.mark.parametrize("items", [0, 1, 1 << 40, (1 << 64) - 1])
def test_refuses_a_number_of_items_that_is_not_paid_for(items: int) -> None:
    assert put_together({}) == WHOLE
    with pytest.raises(MetadataError):
        decode_index(put_together({}, items=items))


@pytest.mark.parametrize(
    "structure",
    [
        b"{}", b"[]", b"nul", b"[" * 100_000,
        b'{"names": 5, "properties": [], "transforms": []}',
        b'{"names": ["step", "a", "a", "b"], "properties": [["float32","strided",false,0,false]], "transforms": []}',
        b'{"names": ["step", "a", "b", "c"], "properties": [["save","strided",false,0,false]], "transforms": []}',
        b'{"names": ["step", "a", "b", "c"], "properties": [["float32","load",false,0,false]], "transforms": []}',
        b'{"names": ["step", "a", "b", "c"], "properties": [["float32","strided",false,9,false]], "transforms": []}',
    ],
)  # fmt: skip
def test_refuses_an_impossible_structure(structure: bytes) -> None:
    with pytest.raises(MetadataError):
        decode_index(put_together({0: zlib.compress(structure)}, {0: len(structure)}))


# How `.metadata` names it


def test_names_the_index_in_the_first_bytes_of_the_metadata() -> None:
    metadata, facts = example()
    ref = make_ref(TOKEN, WHOLE)
    data = encode_metadata(metadata, bucketpoint=facts, index=ref)
    assert find_ref(data[:512]) == ref
    assert ref.fits(WHOLE)
    assert not ref.fits(WHOLE[:-1] + b"x")
    assert keys.parse_data_path(ref.path) == (TOKEN, 0, "index", 0)
    found = decode_metadata(data)
    assert found == metadata
    assert ref_of(found) == ref
    assert pickle.loads(data) == metadata
    assert ref_of(decode_metadata(encode_metadata(metadata, bucketpoint=facts))) is None
    assert not is_index(data)


def test_drops_the_name_of_an_index_from_metadata_that_is_written_anew() -> None:
    metadata, facts = example()
    found = decode_metadata(encode_metadata(metadata, bucketpoint=facts, index=make_ref(TOKEN, WHOLE)))
    del found.state_dict_metadata["optim.a"]
    again = encode_metadata(found, bucketpoint=extra(found))
    assert find_ref(again) is None
    assert INDEX_ATTRIBUTE.encode() not in again


@pytest.mark.parametrize("path", ["../secret", "data/00/0123456789ab-0-index-0.distcp", index_path(TOKEN) + "\n"])
def test_ignores_a_name_that_is_not_an_index_of_ours(path: str) -> None:
    metadata, facts = example()
    ref = dataclasses.replace(make_ref(TOKEN, WHOLE), path=path)
    assert find_ref(encode_metadata(metadata, bucketpoint=facts, index=ref)) is None


@pytest.mark.parametrize("number", [b"1", b"3"])
def test_reads_metadata_itself_that_names_an_index_of_another_format(number: bytes) -> None:
    metadata, facts = example()
    data = encode_metadata(metadata, bucketpoint=facts, index=make_ref(TOKEN, WHOLE))
    other = data[: -len(trailer(0))].replace(b"bucketpoint-index/2 ", b"bucketpoint-index/" + number + b" ")
    assert b"index/" + number in other
    assert find_ref(other) is None
    assert decode_metadata(other) == metadata
