"""The measurement of the index compares metadata that says the same. Its bytes are the same on any machine."""

from __future__ import annotations

import pytest

from sim import index


@pytest.mark.parametrize("irregular", [False, True])
def test_plans_the_same_from_a_small_index_as_from_a_pickle(irregular: bool) -> None:
    found = index.measure(4, irregular=irregular)
    assert found["items"] == 873 * 4 + 291 + 1
    assert {found[kind]["planned"] for kind in index.KINDS} == {found["stock"]["planned"]}
    assert found["stock"]["planned"] >= 873 + 291
    assert found["index"]["bytes"] / found["items"] <= 12
    assert found["stock"]["bytes"] / found["items"] > 150
    assert len(list(index.lines(4, irregular, found))) == 3
