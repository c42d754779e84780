"""What is left of composing: nothing, and in a bucket that keeps versions no version of a component either."""

from __future__ import annotations

import json
import os

import pytest

from bucketpoint.stores import Part, open_store
from gcs_server import GCSServer


@pytest.mark.parametrize("ends", ["completed", "aborted"])
def test_no_version_of_a_component_stays(gcs: GCSServer, ends: str) -> None:
    bucket = f"versions-{os.urandom(6).hex()}"
    made = {"name": bucket, "versioning": {"enabled": True}}
    gcs.ask("POST", "/storage/v1/b?project=test", json.dumps(made).encode())
    store, _ = open_store(gcs.url(bucket), storage_options={**gcs.options, "uploads": "compose"})
    upload = store.create_multipart("a/x")
    parts: list[Part] = []
    for number in range(1, 35):
        body = f"{number},".encode()
        parts.append(store.put_part("a/x", upload, number, [memoryview(body)]))
    if ends == "completed":
        store.complete_multipart("a/x", upload, parts)
    else:
        store.abort_multipart("a/x", upload)
    found = json.loads(gcs.ask("GET", f"/storage/v1/b/{bucket}/o?versions=true"))
    assert [item["name"] for item in found.get("items", [])] == (["a/x"] if ends == "completed" else [])
