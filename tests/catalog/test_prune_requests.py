"""What a prune costs on a real server, by the requests that arrive there, whatever the store calls them."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest

from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.deletion.prune import prune
from bucketpoint.location import Location
from bucketpoint.stores import proven_deletes
from catalog.memory import save
from catalog.test_pruner import drop
from kit import FaultProxy
from services import Service


@pytest.fixture
def catalog(service: Service, proxy: FaultProxy) -> Catalog:
    return open_catalog(Location.of(service.url("run"), service.at(proxy.url).options))


def sent(proxy: FaultProxy) -> Counter[str]:
    """Requests since the proxy was cleared, by S3's names for them."""
    return Counter(one.request.kind for one in proxy.exchanges)


def test_deletes_a_checkpoint_of_64_objects_with_few_requests(
    catalog: Catalog, service: Service, proxy: FaultProxy
) -> None:
    # Of a service that nobody knows it is tried out once what a deletion may take.
    proven_deletes(catalog.store, catalog.key("_bucketpoint"))

    def cost(*steps: int) -> Counter[str]:
        for step in steps:
            save(catalog, step, objects=61)
            assert sum(1 for _ in catalog.store.list(catalog.key(f"step-{step}/"))) == 64
        save(catalog, 1000)
        proxy.clear()
        assert len(prune(catalog, drop(*steps), grace=0, holder="me").deleted) == len(steps)
        return sent(proxy)

    nothing, first, one, two = cost(), cost(100), cost(200), cost(300, 400)
    # Before the first deletion of a process it is asked once whether data may be deleted.
    assert first - one == Counter(DeleteObjects=1)
    # The tombstone is put, claimed, and deleted with what else was noted; then two listings see who came in meanwhile.
    tombstone = Counter(PutObject=2, DeleteObjects=1, ListObjects=2)
    # The commit goes by a conditional DELETE. Where the store has none it is replaced by a marker, which goes last.
    able = proven_deletes(catalog.store, catalog.key("_bucketpoint"))
    uncommit = Counter(DeleteObject=1) if able.conditional_delete else Counter(PutObject=1, DeleteObject=1)
    batches = ceil((61 + 2 + 1) / service.keys_in_a_delete)
    # Before the first deletion the newest checkpoint is listed.
    assert one - nothing - tombstone == uncommit + Counter(ListObjects=2, DeleteObjects=batches)
    # Of a second one only the folder's listing and its commit are its own, and what no longer fits into the requests
    # for the first.
    batches = ceil(2 * (61 + 2 + 1) / service.keys_in_a_delete) - batches
    assert two - one == uncommit + Counter(PutObject=2, ListObjects=1, DeleteObjects=batches)
