"""The tier of each test: `make test` runs every behaviour once, on one server; CI and `make test-full` run the rest.

A test is `broad` if it repeats on a further server what the same test shows on MinIO, or if it is marked so because of
the time that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

FURTHER = frozenset({"moto", "gcs", "gcs_xml", "minio-crt", "versitygw"})
"""Servers and engines that say of S3, or of the code above the stores, what MinIO says."""

ALWAYS_FURTHER = frozenset({"minio-crt", "versitygw"})


def mark_broad(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that repeat another one on a further server."""
    items = list(items)
    on_minio = {_function(item) for item in items if "minio" in _servers(item)}
    for item in items:
        servers = _servers(item)
        # What GCS's own store does is nowhere else to be seen.
        of_gcs = "gcs" in servers and "stores" in item.path.parts
        repeats = bool(servers & FURTHER) and _function(item) in on_minio and "minio" not in servers and not of_gcs
        if repeats or servers & ALWAYS_FURTHER:
            item.add_marker(pytest.mark.broad)


def _function(item: pytest.Item) -> tuple[str, str]:
    return str(item.path), item.nodeid.partition("[")[0]


def _servers(item: pytest.Item) -> set[str]:
    """The servers that a test names: by its parameters, or by the fixture of one."""
    callspec = getattr(item, "callspec", None)
    named = set(map(str, callspec.params.values())) if callspec is not None else set()
    return (named | set(getattr(item, "fixturenames", ()))) & (FURTHER | {"minio"})
