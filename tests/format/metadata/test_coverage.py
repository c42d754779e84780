"""Coverage: chunks that make up their tensors are told from chunks that do not, in metadata and in an index of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from bucketpoint.format.index.encode import encode_index
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.metadata.codec import encode_metadata, extension
from bucketpoint.format.metadata.coverage import PARTIAL, lacking_ranks, uncovered
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.storage_info import make_storage_info
from kit.metadata import tensor_entry

Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]


def metadata_of(**tensors: Any) -> Metadata:
    places: dict[MetadataIndex, Any] = {MetadataIndex("step"): make_storage_info("data/0.distcp", 0, 64, crc32c=1)}
    for name, one in tensors.items():
        for number, chunk in enumerate(one.chunks):
            at, nbytes = 64 * len(places), 4 * math.prod(chunk.sizes)
            info = make_storage_info("data/0.distcp", at, 64, crc32c=1, payload_offset=0, payload_nbytes=nbytes)
            places[MetadataIndex(name, chunk.offsets, number)] = info
    return Metadata({**tensors, "step": BytesStorageMetadata()}, {}, places, StorageMeta("file:///x", "1"))


def grid(size: Sequence[int], by: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    axes = [[(at, min(step, whole - at)) for at in range(0, whole, step)] for whole, step in zip(size, by, strict=True)]
    return [([at for at, _ in cell], [n for _, n in cell]) for cell in itertools.product(*axes)]


PINWHEEL: Boxes = [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])]

WHOLE: dict[str, tuple[Sequence[int], Boxes]] = {
    "one chunk": ([4, 3], [([0, 0], [4, 3])]),
    "rows": ([7, 3], grid([7, 3], [2, 3])),
    "a grid in three axes": ([4, 6, 5], grid([4, 6, 5], [2, 4, 3])),
    "a pinwheel": ([3, 3], PINWHEEL),
    "ranks without a part": ([3], [([0], [2]), ([2], [1]), ([3], [0])]),
    "no elements": ([0, 5], [([0, 0], [0, 5])]),
    "no elements and no chunk": ([0, 5], []),
    "a scalar": ([], [([], [])]),
}
PARTS: dict[str, tuple[Sequence[int], Boxes]] = {
    "half": ([64], [([0], [32])]),
    "one cell of a grid is missing": ([4, 4], grid([4, 4], [2, 2])[:3]),
    "no chunk": ([4], []),
    "a scalar without a chunk": ([], []),
    "a hole of the size of an overlap": ([8], [([0], [4]), ([2], [4])]),
    "a hole in two axes": ([2, 2], [([0, 0], [1, 2]), ([0, 0], [2, 1])]),
}


def told(metadata: Any) -> list[list[str]]:
    """What is uncovered, in the classes of DCP, in plain ones, and by the index."""
    seen = [metadata, read_metadata(encode_metadata(metadata, bucketpoint={}))]
    # In an index no two items have one place.
    if len(metadata.storage_data) == sum(len(getattr(one, "chunks", "1")) for one in entries_of(metadata)):
        encoded = encode_index(metadata, bucketpoint=extension({"objects": {}})["bucketpoint"])
        assert encoded is not None
        seen.append(decode_index(encoded))
    return [[name for name, _ in uncovered(each, {})] for each in seen]


def entries_of(metadata: Metadata) -> list[Any]:
    return list(metadata.state_dict_metadata.values())


@pytest.mark.parametrize("kind", WHOLE)
def test_takes_chunks_that_make_up_the_tensor(kind: str) -> None:
    assert not any(told(metadata_of(w=tensor_entry(*WHOLE[kind]))))


@pytest.mark.parametrize("kind", PARTS)
def test_names_a_tensor_of_which_there_is_a_part_only(kind: str) -> None:
    metadata = metadata_of(a=tensor_entry(*WHOLE["rows"]), w=tensor_entry(*PARTS[kind]))
    assert {tuple(each) for each in told(metadata)} == {("w",)}
    assert not list(uncovered(metadata, {PARTIAL: True}))


def test_counts_the_ranks_that_have_a_value() -> None:
    names = ["w", "rng.rank-0", "rng.rank-1", "loader.rank-1.at", "loader.rank-1.of", "a.rank-2x"]
    assert list(lacking_ranks(names, 2)) == [("loader", "has the values of 1 of 2 ranks")]


def test_names_a_chunk_that_is_listed_twice() -> None:
    metadata = metadata_of(w=tensor_entry([4], [([0], [2]), ([2], [2]), ([2], [2])]))
    assert [name for name, _ in uncovered(metadata, {})] == ["w"]
