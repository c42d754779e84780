"""A `.metadata` made of the one before it says what one made of nothing would."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import BytesStorageMetadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.format.metadata import codec
from bucketpoint.format.metadata.codec import extension
from bucketpoint.format.metadata.template import make_template
from bucketpoint.format.pickles.machine import Machine
from bucketpoint.format.storage_info import Columns, IndexColumns, make_storage_info, pack, unpack
from kit.metadata import chunk_of, tensor_entry

U32 = st.integers(0, (1 << 32) - 1) | st.sampled_from([0, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
# Number of the object, checksum, and if there is a table of block checksums.
ITEMS = st.lists(st.tuples(st.integers(0, 2), U32, st.booleans()), max_size=6)
RANKS = st.lists(ITEMS, min_size=1, max_size=3)


def index_columns(indices: list[list[MetadataIndex]]) -> IndexColumns:
    """Keys of the storage data of each rank's items."""
    every = [index for mine in indices for index in mine]
    borders = itertools.accumulate(map(len, indices), initial=0)
    hints = [-1 if index.index is None else index.index for index in every]
    return IndexColumns([index.fqn for index in every], [index.offset for index in every], hints, tuple(borders))


def columns_of(ranks: list[Any], info: Callable[..., Any]) -> list[Columns]:
    """Columns of each rank's items, of which `info(rank, place of the item, item)` makes the storage info."""
    packed = [pack([info(rank, at, item) for at, item in enumerate(items)]) for rank, items in enumerate(ranks)]
    assert None not in packed
    return packed


def save(ranks: list[Any], token: int) -> list[Columns]:
    def info(rank: int, at: int, item: tuple[int, int, bool]) -> Any:
        number, crc, tabled = item
        return make_storage_info(
            f"data/{token:012x}-{rank}-{number}", 100 * at, 90, payload_offset=10, payload_nbytes=64, crc32c=crc,
            block_nbytes=16, table_offset=70_000 + at if tabled else None,
        )  # fmt: skip

    return columns_of(ranks, info)


DIMS = st.integers(0, 3) | st.sampled_from([255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40])
CHUNKS = st.lists(st.lists(st.tuples(DIMS, DIMS), max_size=5), min_size=1, max_size=3)


def described(draw: Any, indices: list[str]) -> tuple[Metadata, list[MetadataIndex]]:
    """Metadata of values, and of tensors with a chunk for each of one to three consecutive indices."""
    state: dict[str, Any] = {}
    found: list[MetadataIndex] = []
    while len(found) < len(indices):
        name = indices[len(found)]
        chunks = draw(CHUNKS | st.none())
        if chunks is None:
            state[name] = BytesStorageMetadata()
            found.append(MetadataIndex(name))
            continue
        boxes = {
            tuple(at for at, _ in box): tuple(size for _, size in box) for box in chunks[: len(indices) - len(found)]
        }
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        state[name] = tensor_entry([size for _, size in chunks[0]], boxes.items(), dtype)
        found += [MetadataIndex(name, chunk.offsets, at) for at, chunk in enumerate(state[name].chunks)]
    return Metadata(state, {name: (name, 0, ("deep", number)) for number, name in enumerate(state)}), found


@given(RANKS, st.data(), st.booleans(), st.sampled_from(["data/x", "data/" + "long" * 70]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_fills_the_template_of_an_earlier_save_with_what_a_pickle_of_objects_says(
    ranks: list[Any], data: st.DataObject, transformed: bool, path: str, added: int
) -> None:
    names = [f"{rank}.{at}" for rank, items in enumerate(ranks) for at in range(len(items))]
    metadata, flat = described(data.draw, names)
    indices = [[flat.pop(0) for _ in items] for items in ranks]

    def info(rank: int, at: int, item: tuple[int, int, bool]) -> Any:
        number, crc, tabled = item
        return make_storage_info(
            f"{path}-{rank}-{number}", data.draw(DIMS), data.draw(DIMS), crc32c=crc,
            block_nbytes=data.draw(DIMS) + 1, table_offset=data.draw(DIMS if tabled else st.none()),
            transform_descriptors=["zstd", "aes"] if transformed else None,
            **({"payload_offset": data.draw(DIMS), "payload_nbytes": data.draw(DIMS)} if at % 2 else {}),
        )  # fmt: skip

    packed = columns_of(ranks, info)
    # Of an earlier save: other names of the objects, and other checksums.
    earlier = [
        Columns(
            each.layout, tuple([(path.upper(), *facts) for path, *facts in each.objects]), bytes(len(each.checksums))
        )
        for each in packed
    ]
    template = make_template(metadata, index_columns(indices), earlier)
    end = end_of({"token": "é" * added, "created": 1.5, "objects": {"data/x": {"size": added, "etag": None}}})
    filled = template.fill(packed, end)
    assert filled is not None
    stored = {
        index: info
        for named, columns in zip(indices, packed, strict=True)
        for index, info in zip(named, unpack(columns), strict=True)
    }
    # Of any chunks: what lies outside of its tensor is refused later.
    Machine(filled, codec.vocabulary()).run()
    for load in (pickle.loads, pickle._loads):  # type: ignore[attr-defined]
        found = load(filled)
        assert list(found.state_dict_metadata.items()) == list(metadata.state_dict_metadata.items())
        assert found.planner_data == metadata.planner_data
        assert {name: vars(found)[name] for name in end} == end
        assert [(index, index.index, vars(info)) for index, info in found.storage_data.items()] == [
            (index, index.index, {name: value for name, value in vars(info).items() if value is not None})
            for index, info in stored.items()
        ]
        assert all(type(index.offset) in (torch.Size, type(None)) for index in found.storage_data)


def test_makes_no_template_of_metadata_of_unusual_kinds() -> None:
    class OwnChunk(ChunkStorageMetadata):
        pass

    ranks: list[Any] = [[(0, 5, False)]]
    index = MetadataIndex("a", [0], 0)
    chunk = chunk_of(([0], [1]))
    own = OwnChunk(torch.Size([0]), torch.Size([1]))
    plain = ChunkStorageMetadata((0,), (1,))  # type: ignore[arg-type]
    marked = chunk_of(([0], [1]))
    marked.more = 1  # type: ignore[attr-defined]
    for kind, has in ((chunk, True), (own, False), (plain, False), (marked, False)):
        state: dict[str, Any] = {"a": TensorStorageMetadata(TensorProperties(), torch.Size([1]), [kind])}
        for named, known in ((state, True), ({**state, "b": None}, False), ({}, False)):
            items = index_columns([[index]])
            assert (make_template(Metadata(named), items, save(ranks, 1)) is not None) == (has and known)


def end_of(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "storage_meta": StorageMeta(checkpoint_id="s3://bucket/x", save_id="1"),
        "version": None,
        **extension(facts),
    }


def test_fills_a_template_again_and_again_but_not_with_what_does_not_fit_its_gaps() -> None:
    ranks = [[(0, 1, True), (1, 2, False)]]
    items = index_columns([[MetadataIndex("a"), MetadataIndex("b")]])
    metadata = Metadata({"a": BytesStorageMetadata(), "b": BytesStorageMetadata()}, {})
    template = make_template(metadata, items, save(ranks, 1))
    (columns,) = save(ranks, 2)
    end = end_of({})
    one, other, third = (template.fill(save(ranks, token), end) for token in (2, 3, 2))
    assert one == third != other
    longer = tuple([(f"{path}x", None, None) for path, *_ in columns.objects])
    assert template.fill([Columns(columns.layout, longer, columns.checksums)], end) is None
    assert template.fill([Columns(columns.layout, columns.objects[:1], columns.checksums)], end) is None
    assert template.fill([Columns(columns.layout, columns.objects, columns.checksums + bytes(4))], end) is None
    assert template.fill([columns, columns], end) is None
