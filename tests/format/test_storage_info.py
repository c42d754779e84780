"""What rides on DCP's _StorageInfo: stock, small, and distrusted when it comes back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo

from bucketpoint.errors import MetadataError
from bucketpoint.format.item_info import ItemInfo, read_item
from bucketpoint.format.storage_info import (
    SINGLE_BLOCK_NBYTES,
    make_storage_info,
    plan_blocks,
    pop_object_facts,
    set_object_facts,
)

MIB = 1 << 20
KIB = 1 << 10

crcs = st.integers(0, (1 << 32) - 1)


@given(
    offset=st.integers(0, 1 << 50),
    payload=st.integers(0, 1 << 40),
    crc=crcs,
)
def test_reads_an_item_back_as_it_was_written_after_a_stock_pickle(offset: int, payload: int, crc: int) -> None:
    info = make_storage_info(
        "data/00/x.distcp", offset, payload + 704, payload_offset=384, payload_nbytes=payload, crc32c=crc,
        block_nbytes=payload,
    )  # fmt: skip
    assert type(info) is _StorageInfo
    again = read_item(pickle.loads(pickle.dumps(info)))
    assert again == ItemInfo(
        "data/00/x.distcp", offset, payload + 704, None, 384, payload, crc, payload, (crc,) if payload else ()
    )  # fmt: skip
    assert again.checked_nbytes == payload


@given(nbytes=st.integers(2, 1 << 40), data=st.data())
def test_says_in_an_item_where_the_table_of_its_blocks_lies(nbytes: int, data: Any) -> None:
    smallest = -(-nbytes // (16 << 20))
    block, table = data.draw(st.integers(smallest, nbytes - 1)), data.draw(st.integers(0, 1 << 50))
    info = make_storage_info(
        "x", 7, nbytes + 704, payload_offset=384, payload_nbytes=nbytes, crc32c=9, block_nbytes=block,
        table_offset=table,
    )  # fmt: skip
    again = read_item(pickle.loads(pickle.dumps(info)))
    assert again == ItemInfo("x", 7, nbytes + 704, None, 384, nbytes, 9, block, None, table)
    assert again.table_nbytes == 4 * -(-nbytes // block)
    # What knows no tables finds an item of one block.
    for name in ("bp_tn", "bp_to"):
        delattr(info, name)
    assert read_item(info).block_crcs == (9,)


def test_leaves_empty_what_an_item_of_a_foreign_writer_lacks() -> None:
    assert read_item(_StorageInfo("__0_0.distcp", 5, 100)) == ItemInfo("__0_0.distcp", 5, 100)
    transformed = _StorageInfo("__0_0.distcp", 5, 100, ["stream.zstd"])
    assert read_item(transformed).transform_descriptors == ("stream.zstd",)


def test_checks_an_item_without_a_payload_as_a_whole() -> None:
    info = read_item(make_storage_info("x", 0, 100, crc32c=7, transform_descriptors=["stream.zstd"]))
    assert (info.payload_offset, info.crc32c, info.block_nbytes, info.block_crcs) == (None, 7, 100, (7,))
    assert info.checked_nbytes == 100


TABLED = make_storage_info(
    "x", 0, 1000, payload_offset=384, payload_nbytes=600, crc32c=1, block_nbytes=100, table_offset=1000
)


@pytest.mark.parametrize(
    "change",
    [
        {"bp_tn": 0},
        {"bp_tn": 600},
        {"bp_tn": None},
        {"bp_to": None},
        {"bp_to": -1},
        {"bp_crc": None},
        {"bp_pn": 1 << 50, "length": 1 << 51},
        {"relative_path": 3},
        {"relative_path": ""},
        {"relative_path": "x" * 10_000},
        {"offset": -1},
        {"offset": True},
        {"offset": 1 << 63},
        {"length": 983},
        {"transform_descriptors": "zstd"},
        {"transform_descriptors": [3]},
        {"bp_po": None},
        {"bp_po": 401},
        {"bp_pn": None},
        {"bp_pn": 617},
        {"bp_crc": 1 << 32},
        {"bp_crc": "1"},
    ],
    ids=str,
)
def test_refuses_values_that_do_not_fit(change: dict[str, Any]) -> None:
    damaged = copy.copy(TABLED)
    vars(damaged).update(change)
    assert read_item(TABLED).table_nbytes == 24
    with pytest.raises(MetadataError):
        read_item(damaged)


def test_refuses_any_other_class() -> None:
    with pytest.raises(MetadataError, match="dict"):
        read_item({"relative_path": "x", "offset": 0, "length": 1})


def test_takes_facts_of_the_object_off_before_the_commit() -> None:
    info = make_storage_info("x", 0, 100)
    before = dict(vars(info))
    set_object_facts(info, size=100, etag="abc")
    carried = pickle.loads(pickle.dumps(info))
    assert pop_object_facts(carried) == {"size": 100, "etag": "abc"}
    assert vars(carried).keys() <= before.keys()
    assert pop_object_facts(carried) is None


@given(nbytes=st.integers(0, 1 << 42), row=st.integers(0, 1 << 30))
def test_makes_few_blocks_of_a_moderate_size(nbytes: int, row: int) -> None:
    assume(row <= nbytes)
    block = plan_blocks(nbytes, row)
    if nbytes <= SINGLE_BLOCK_NBYTES:
        assert block == nbytes
        return
    assert 0 < block <= 12 * MIB + row
    assert block >= 32 * KIB
    assert -(-nbytes // block) <= max(512, nbytes // (512 * KIB))


@given(row=st.integers(1, 1 << 24), exponent=st.integers(3, 20), odd=st.sampled_from([1, 3, 5, 7]))
def test_begins_halves_quarters_and_eighths_of_the_rows_at_block_borders(row: int, exponent: int, odd: int) -> None:
    rows = odd << exponent
    nbytes = rows * row
    # Below 2 MiB there are fewer than eight blocks; rows of odd length can be too large to be one block each.
    assume(nbytes >= 2 * MIB)
    assume(row < 96 * KIB)  # larger ones may have no divisor of a block's size
    block = plan_blocks(nbytes, row)
    assert (nbytes // 8) % block == 0


@given(rows=st.integers(1, 64), row=st.integers(1, 1 << 12).map(lambda n: n * 64 * KIB))
def test_begins_every_row_that_is_larger_than_a_block_at_a_block_border(rows: int, row: int) -> None:
    assume(row >= 8 * MIB)
    assert row % plan_blocks(rows * row, row) == 0


def test_reads_little_in_excess_for_a_slice_at_any_row_of_an_odd_table() -> None:
    rows, row = 50257, 768 * 4
    block = plan_blocks(rows * row, row)
    quarter = -(-rows // 4) * row
    assert block % row == 0
    assert 2 * block < 0.07 * quarter
