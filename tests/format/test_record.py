"""The JSON record beside the metadata."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import MetadataError, NewerFormatError
from bucketpoint.format.record import CommitRecord

counts = st.integers(0, (1 << 62) - 1)
records = st.builds(
    CommitRecord,
    token=st.none() | st.text(),
    created=st.none() | st.floats(0, 1e11) | st.integers(0, 1 << 33),
    seconds=st.none() | st.floats(0, 1e11) | st.integers(0, 1 << 33),
    bytes=counts,
    objects=counts,
    items=counts,
    tensors=counts,
    world_size=st.none() | counts,
    torch=st.none() | st.text(),
    bucketpoint=st.none() | st.text(),
    metadata_etag=st.none() | st.text(),
    metadata_crc32c=st.none() | counts,
    groups=st.dictionaries(st.text(), counts, max_size=4),
    step=st.none() | counts,
    kind=st.text(),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=4),
    git_sha=st.none() | st.text(),
    config_hash=st.none() | st.text(),
    host=st.none() | st.text(),
)


@given(records)
def test_reads_a_record_back_as_it_was_written(record: CommitRecord) -> None:
    assert CommitRecord.from_json(record.to_json()) == record


def test_writes_metrics_that_are_not_finite_as_plain_json() -> None:
    record = CommitRecord(metrics={"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1.5})
    content = json.loads(record.to_json(), parse_constant=pytest.fail)
    assert content["metrics"] == {"a": "nan", "b": "inf", "c": "-inf", "d": 1.5}
    assert repr(CommitRecord.from_json(record.to_json()).metrics) == repr(record.metrics)


def test_drops_fields_that_this_bucketpoint_does_not_know() -> None:
    data = json.dumps({"version": 1, "bytes": 5, "colour": "blue", "changes": {"since": None, "parts": {}}}).encode()
    assert CommitRecord.from_json(data) == CommitRecord(bytes=5)


def test_refuses_a_record_of_a_higher_version() -> None:
    with pytest.raises(NewerFormatError, match="version 2") as raised:
        CommitRecord.from_json(b'{"version": 2, "bytes": 5}', url="s3://bucket/run")
    assert raised.value.url == "s3://bucket/run"
    assert "Upgrade" in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"bytes": -1},
        {"bytes": 1.5},
        {"bytes": True},
        {"objects": 1 << 70},
        {"created": "yesterday"},
        {"created": float("nan")},
        {"created": float("inf")},
        {"seconds": -1.0},
        {"world_size": []},
        {"token": 3},
        {"groups": []},
        {"groups": {"model": "much"}},
        {"metadata_crc32c": -1},
        {"step": -1},
        {"kind": None},
        {"metrics": []},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": None}},
        {"metrics": {"loss": []}},
        {"metrics": {"loss": True}},
        {"metrics": {"loss": 10**400}},
    ],
    ids=str,
)
def test_refuses_wrong_types(change: dict[str, Any]) -> None:
    with pytest.raises(MetadataError):
        CommitRecord.from_json(json.dumps({"version": 1, **change}).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"3", b"\xff", b"{", b"[" * 100_000, b'{"version": 1}' + b" " * (2 << 20)]
)
def test_refuses_what_is_no_record(data: bytes) -> None:
    with pytest.raises(MetadataError):
        CommitRecord.from_json(data)


@pytest.mark.parametrize("change", [{"bytes": 6}, {"step": None}, {"unknown": 1}, {"metrics": {"loss": 0.25}}], ids=str)
def test_finds_damage_in_a_record_that_is_not_the_one_that_was_written(change: dict[str, Any]) -> None:
    content = json.loads(CommitRecord(bytes=5, step=3, metrics={"loss": 0.5}).to_json())
    with pytest.raises(MetadataError, match="damaged"):
        CommitRecord.from_json(json.dumps({**content, **change}).encode())


def test_sums_what_a_record_says_and_not_how() -> None:
    record = CommitRecord(bytes=5, metrics={"loss": math.nan, "lr": 1e-4})
    content = json.loads(record.to_json())
    assert CommitRecord.from_json(json.dumps(content, indent=2).encode()).to_json() == record.to_json()
    # Those of before there was one have none.
    del content["check"]
    assert CommitRecord.from_json(json.dumps(content).encode()).bytes == 5
