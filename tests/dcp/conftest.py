"""Ranks that stay up for the whole session or for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp.ranks import Ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """DCP starts a checkpoint process once in a process: the tests of a module share theirs."""
    with Ranks(1) as ranks:
        yield ranks
