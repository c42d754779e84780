"""A `.metadata` made of the one before it says what one made of nothing would."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import BytesStorageMetadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from bucketpoint.errors import BucketpointError
from bucketpoint.format.columns import Columns, pack, unpack
from bucketpoint.format.metadata import decode_metadata, encode_metadata, extension
from bucketpoint.format.storage_info import make_storage_info
from bucketpoint.format.template import make_template

U32 = st.integers(0, (1 << 32) - 1) | st.sampled_from([0, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
ITEMS = st.lists(st.tuples(st.integers(0, 2), st.lists(U32, min_size=0, max_size=4)), max_size=6)
RANKS = st.lists(ITEMS, min_size=1, max_size=3)


def save(ranks: list[Any], token: int, checksum: Any) -> list[Columns]:
    """Columns of a save whose checksums are made by `checksum(the one drawn)`."""
    packed = []
    for rank, items in enumerate(ranks):
        infos = [
            make_storage_info(
                f"data/{token:012x}-{rank}-{number}", 100 * at, 90, payload_offset=10, payload_nbytes=64,
                crc32c=checksum(at), block_nbytes=16, block_crcs=[checksum(crc) for crc in crcs],
            )
            for at, (number, crcs) in enumerate(items)
        ]  # fmt: skip
        columns = pack(infos)
        assert columns is not None
        packed.append(columns)
    return packed


def end_of(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "storage_meta": StorageMeta(checkpoint_id="s3://bucket/x", save_id="1"),
        "version": None,
        **extension(facts),
    }


@given(RANKS, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_filled_template_is_the_metadata_of_the_later_save(ranks: list[Any], added: int) -> None:
    indices = [[MetadataIndex(f"{rank}.{at}") for at in range(len(items))] for rank, items in enumerate(ranks)]
    fqns = [index.fqn for named in indices for index in named]
    metadata = Metadata({fqn: BytesStorageMetadata() for fqn in fqns}, {fqn: (fqn,) for fqn in fqns})
    template = make_template(metadata, indices, save(ranks, 1, lambda crc: crc))
    assert template is not None
    later = save(ranks, 0xABCDEF012345, lambda crc: (crc * 31 + added) % (1 << 32))
    end = end_of({"token": "é" * added, "created": 1.5, "objects": {"data/x": {"size": added, "etag": None}}})
    filled = template.fill(later, end)
    assert filled is not None
    stored = {
        index: info
        for named, columns in zip(indices, later, strict=True)
        for index, info in zip(named, unpack(columns), strict=True)
    }
    whole = Metadata(metadata.state_dict_metadata, metadata.planner_data, stored, end["storage_meta"])
    encoded = encode_metadata(whole, bucketpoint=end["bucketpoint"])
    for decode in (decode_metadata, pickle.loads, pickle._loads):  # type: ignore[attr-defined]
        one, other = decode(filled), decode(encoded)
        assert {index: vars(info) for index, info in one.storage_data.items()} == {
            index: vars(info) for index, info in other.storage_data.items()
        }
        assert list(one.storage_data) == list(other.storage_data)
        assert {**vars(one), "storage_data": 0} == {**vars(other), "storage_data": 0}


def simple() -> tuple[list[Any], Any]:
    ranks = [[(0, [1, 2]), (1, [])]]
    indices = [[MetadataIndex("a"), MetadataIndex("b")]]
    metadata = Metadata({"a": BytesStorageMetadata(), "b": BytesStorageMetadata()}, {})
    return ranks, make_template(metadata, indices, save(ranks, 1, int))


def test_what_does_not_fit_the_gaps_is_not_filled_in() -> None:
    ranks, template = simple()
    (columns,) = save(ranks, 2, int)
    end = end_of({})
    assert template.fill([columns], end) is not None
    longer = tuple([(f"{path}x", None, None) for path, *_ in columns.objects])
    assert template.fill([Columns(columns.layout, longer, columns.checksums)], end) is None
    assert template.fill([Columns(columns.layout, columns.objects[:1], columns.checksums)], end) is None
    assert template.fill([Columns(columns.layout, columns.objects, columns.checksums + bytes(4))], end) is None
    assert template.fill([columns, columns], end) is None


def test_a_template_is_filled_again_and_again() -> None:
    ranks, template = simple()
    one, other, third = (template.fill(save(ranks, token, int), end_of({})) for token in (2, 3, 2))
    assert one == third != other


def test_facts_that_are_not_plain_are_refused() -> None:
    with pytest.raises(BucketpointError):
        end_of({"token": struct})


def test_items_that_two_ranks_report_have_no_template() -> None:
    ranks = [[(0, [])], [(0, [])]]
    metadata = Metadata({"a": BytesStorageMetadata()}, {})
    assert make_template(metadata, [[MetadataIndex("a")]] * 2, save(ranks, 1, int)) is None
