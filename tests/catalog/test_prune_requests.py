"""What a prune costs on a real S3 server, by the requests that boto3 sends, whatever the store calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.pruner import prune
from bucketpoint.stores.s3_client import client_for
from catalog.memory import save
from catalog.test_pruner import drop
from servers import S3Server


@pytest.fixture
def catalog(s3: S3Server, bucket: str) -> Catalog:
    return open_catalog(s3.url(bucket, "run"), storage_options=s3.options)


@pytest.fixture
def sent(catalog: Catalog) -> Iterator[Counter[str]]:
    """Requests by S3's names for them, retries too."""
    seen: Counter[str] = Counter()

    def note(event_name: str, **more: Any) -> None:
        seen[event_name.rpartition(".")[2]] += 1

    events = client_for(catalog.store.options).api.meta.events  # type: ignore[attr-defined]
    events.register("before-send.s3", note)
    yield seen
    events.unregister("before-send.s3", note)


def test_a_checkpoint_of_64_objects_costs_four_requests_besides_its_tombstone(
    catalog: Catalog, sent: Counter[str]
) -> None:
    def cost(*steps: int) -> Counter[str]:
        for step in steps:
            save(catalog, step, objects=61)
            assert sum(1 for _ in catalog.store.list(catalog.key(f"step-{step}/"))) == 64
        save(catalog, 1000)
        sent.clear()
        assert len(prune(catalog, drop(*steps), grace=0, holder="me").deleted) == len(steps)
        return Counter(sent)

    nothing, one, two = cost(), cost(100), cost(200, 300)
    # The tombstone is put, claimed, and deleted with what else was noted; then two listings see who came in meanwhile.
    tombstone = Counter(PutObject=2, DeleteObjects=1, ListObjectsV2=2)
    assert one - nothing - tombstone == Counter(ListObjectsV2=1, DeleteObjects=3)
    # Of a second one only the folder's listing is its own.
    assert two - one == Counter(PutObject=2, ListObjectsV2=1)


def test_the_newest_checkpoint_is_found_by_one_listing(catalog: Catalog, sent: Counter[str]) -> None:
    for step in (100, 200, 300):
        save(catalog, step)
    sent.clear()
    assert next(catalog.candidates()).step == 300
    assert sent == Counter(ListObjectsV2=1)
