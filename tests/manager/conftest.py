"""The run's root and the ranks of the manager's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.ranks import Ranks


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
