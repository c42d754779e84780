"""Stores that are made after the environment has changed, and those that were in use before."""

from __future__ import annotations

import pickle

import pytest

from bucketpoint.stores import Store, open_store
from kit import servers
from kit.servers import S3Server


def put(store: Store, key: str) -> None:
    store.put(key, [memoryview(b"data")])


def keys(store: Store) -> list[str]:
    return [found.key for found in store.list("")]


@pytest.mark.contract
def test_uses_another_endpoint_for_stores_that_are_made_afterwards(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = moto.make_bucket()

    def enter(server: S3Server) -> None:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)

    with servers.moto() as other:
        other.client().create_bucket(Bucket=bucket)
        enter(moto)
        first, unused = open_store(f"s3://{bucket}")[0], open_store(f"s3://{bucket}")[0]
        put(first, "one")
        enter(other)
        put(open_store(f"s3://{bucket}")[0], "two")
        # A save under way ends where it began. What was not used yet, or crosses to another process, has no such place.
        put(first, "three")
        put(unused, "four")
        put(pickle.loads(pickle.dumps(first)), "five")
        assert other.keys(bucket) == ["five", "four", "two"]
        assert moto.keys(bucket) == ["one", "three"]
        enter(moto)
        assert keys(open_store(f"s3://{bucket}")[0]) == ["one", "three"]
