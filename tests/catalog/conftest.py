"""A store in memory, and the catalog of a run in it."""

from __future__ import annotations

import pytest

from bucketpoint.catalog.catalog import Catalog
from catalog.memory import MemoryStore, memory_catalog


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return memory_catalog(store)
