"""A deadline ends what no connection of ours carries: look-ups of names and credentials, and calls of a filesystem."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import bucketpoint as bp
from bucketpoint.stores import outage
from kit.failures import failure_of


@pytest.fixture
def hang() -> Iterator[Callable[..., Any]]:
    """A function that does not return before the test has ended."""
    ended = threading.Event()

    def wait(*args: Any, **kwargs: Any) -> Any:
        ended.wait()
        raise OSError("too late")

    yield wait
    ended.set()


def saved(url: str, **where: Any) -> None:
    bp.save({"w": torch.ones(4)}, url, deadline_s=1, **where)


def assert_late(action: Callable[[], object], what: str) -> None:
    said = rf"was not complete after 1 s: rank 0 was .*{what}.* was still running"
    assert re.search(said, str(failure_of(action)))


@pytest.mark.parametrize("method", ["__init__", "info", "pipe_file", "cat_file"])
def test_ends_a_call_of_a_filesystem_that_does_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Callable[..., Any], method: str
) -> None:
    class Stuck(LocalFileSystem):
        protocol = f"stuck{method.strip('_').replace('_', '')}"
        cachable = False

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            return str(path).rpartition("://")[2]

    fsspec.register_implementation(Stuck.protocol, Stuck, clobber=True)
    options = {"auto_mkdir": True}
    url = f"{Stuck.protocol}://{tmp_path}/a"
    if method == "cat_file":
        saved(url, storage_options=options)
    monkeypatch.setattr(Stuck, method, hang)
    if method == "cat_file":
        assert_late(lambda: bp.load({"w": torch.zeros(4)}, url, deadline_s=1, storage_options=options), "stuck")
    else:
        assert_late(lambda: saved(url, storage_options=options), "stuck")


@pytest.mark.parametrize("where", ["socket.getaddrinfo", "botocore.session.Session.get_credentials"])
def test_ends_a_look_up_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch, hang: Callable[..., Any], where: str
) -> None:
    monkeypatch.setattr(where, hang)
    options = {"endpoint_url": "http://nowhere.invalid:9", "key": "a", "secret": "b"}
    if "credentials" in where:
        options = {"endpoint_url": "http://nowhere.invalid:10"}
    assert_late(lambda: saved("s3://bucket/a", storage_options=options), "GetObject|making the client")


@pytest.mark.parametrize("call", [bp.save, bp.load])
def test_names_the_outage_of_the_store_and_its_remedy(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    monkeypatch.setattr(outage, "SILENT_S", 0.2)
    options = {"endpoint_url": "http://127.0.0.1:1", "key": "a", "secret": "hush-hush"}
    failed = str(failure_of(lambda: call({"w": torch.ones(4)}, "s3://bucket/a", deadline_s=3, storage_options=options)))
    said = r"was not complete after 3 s: rank 0 was .* \(requests to s3://bucket have failed for \d s: EndpointError: "
    assert re.search(said, failed)
    assert "Check the endpoint URL" in failed
    assert "deadline_s" not in failed
    assert "hush" not in failed
