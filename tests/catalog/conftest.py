"""A store in memory, and the catalog of a run in it."""

from __future__ import annotations

import pytest

from bucketpoint.catalog.catalog import Catalog
from catalog.memory import MemoryStore, memory_catalog, save


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def catalog(store: MemoryStore) -> Catalog:
    return memory_catalog(store)


@pytest.fixture
def pair(catalog: Catalog) -> Catalog:
    """The catalog of a run that has saved steps 100 and 200."""
    for step in (100, 200):
        save(catalog, step)
    return catalog
