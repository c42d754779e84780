"""Ranks that stay up for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp.ranks import Ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()
