"""Object keys: stable entropy, unique attempts, and no path out of the prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketpoint.errors import UnsafeDataError
from bucketpoint.format import keys

groups = st.text("abcxyzABC019_.", min_size=1, max_size=12)
numbers = st.integers(0, 1 << 40)


@given(rank=numbers, group=groups, n=numbers)
def test_tells_by_a_data_path_what_it_was_made_of(rank: int, group: str, n: int) -> None:
    token = keys.new_token()
    path = keys.data_path(token, rank, group, n)
    assert keys.parse_data_path(path) == (token, rank, group, n)
    assert keys.join("run/step-5", path) == f"run/step-5/{path}"


@given(rank=numbers, group=groups, n=numbers)
def test_keeps_the_folder_of_an_object_over_saves(rank: int, group: str, n: int) -> None:
    first, second = (keys.data_path(keys.new_token(), rank, group, n) for _ in range(2))
    assert first != second
    assert first.split("/")[:2] == second.split("/")[:2]


def test_spreads_the_objects_of_one_save_over_many_folders() -> None:
    token = keys.new_token()
    assert len({keys.data_path(token, rank, "model", 0)[:7] for rank in range(512)}) > 100


def test_repeats_no_token_when_a_training_run_seeds_its_random_numbers() -> None:
    import random

    tokens = set()
    for _ in range(50):
        random.seed(0)
        tokens.add(keys.new_token())
    assert len(tokens) == 50
    assert all(len(token) == 12 and set(token) <= set("0123456789abcdef") for token in tokens)


@pytest.mark.parametrize(
    "path",
    [
        "__0_0.distcp",
        "data/00/0123456789ab-0-model-0.distcp",  # the folder does not follow from the rest
        "data/af/0123456789ab-00-model-0.distcp",
        "data/af/0123456789ab-0-model-0.distcp\n",
        "data/af/0123456789ab-" + "9" * 5000 + "-model-0.distcp",
        "",
    ],
)
def test_treats_other_paths_as_nobodys_data_path(path: str) -> None:
    assert keys.parse_data_path(path) is None


@pytest.mark.parametrize("group", ["", "a/b", "..//", "a-b", "ä"])
def test_refuses_a_group_that_would_break_the_path(group: str) -> None:
    with pytest.raises(ValueError):
        keys.data_path(keys.new_token(), 0, group, 0)


def test_names_rank_metadata_as_stock_readers_look_for_it() -> None:
    assert keys.rank_metadata(3) == "__3.metadata"
    assert keys.METADATA == ".metadata"


@pytest.mark.parametrize(
    "relative",
    [
        "",
        "/etc/passwd",
        "..",
        "../other/step/__0_0.distcp",
        "data/../../x",
        "data/..",
        "..\\x",
        "a\\b",
        "a\0b",
        "a\nb",
        "s3://other/x",
        "file:/etc/passwd",
        "C:x",
        "a\ud800",
    ],
)
def test_refuses_a_path_that_leaves_the_checkpoint(relative: str) -> None:
    with pytest.raises(UnsafeDataError):
        keys.join("run/step", relative)
    with pytest.raises(UnsafeDataError):
        keys.join("", relative)


@pytest.mark.parametrize(
    "path",
    [
        *(".metadata", "./.metadata", "step-2/.metadata", ".METADATA", ".metadata/", "__3.metadata"),
        *(".bucketpoint.json", "a/.Bucketpoint.json", "_bucketpoint/run.json", "x/_bucketpoint/steps/y"),
    ],
)
def test_refuses_to_delete_as_data_what_is_none(path: str) -> None:
    assert not keys.may_be_data(path)
    assert keys.may_be_data(f"data/00/{path.replace('/', '-')}.distcp")


@pytest.mark.parametrize("relative", ["__0_0.distcp", "a b/ü#%+.distcp", "a..b/c", "shard//x", "...", "1/x:y"])
def test_leaves_a_path_within_the_checkpoint_as_it_is(relative: str) -> None:
    assert keys.join("run [1]/*", relative) == f"run [1]/*/{relative}"
    assert keys.join("", relative) == relative
