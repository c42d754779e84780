"""The same search before GCS, on filesystems of fsspec, and in URLs."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import strategies as st

import bucketpoint as bp
from bucketpoint.cli.app import run
from bucketpoint.errors import BucketpointError, CredentialsError, InvalidURLError
from bucketpoint.stores import open_store, retry
from bucketpoint.stores.gcs import GCSOptions
from bucketpoint.stores.redact import HIDDEN, clean, hide, holds_password
from kit.servers import free_port
from security.planted import SECRETS, assert_clean, assert_failure_is_clean, clean_failures
from stores.scripted import Answer, scripted


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "pause", lambda seconds: None)


# fsspec


class Talkative(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem whose errors quote all that it was given, as some do."""

    protocol = "talkative"
    store: dict[str, Any] = {}  # noqa: RUF012 (as its base has it)
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    failing = False

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._fail()
        super().pipe_file(path, value, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        self._fail()
        return super().cat_file(path, **kwargs)

    def _fail(self) -> None:
        if self.failing:
            raise RuntimeError(
                f"refused with {self.storage_options} by https://me:{SECRETS['url password']}@host/x?sig=y"
            )


@pytest.fixture
def talkative() -> Iterator[dict[str, Any]]:
    fsspec.register_implementation("talkative", Talkative, clobber=True)
    yield {
        "account_key": SECRETS["secret key"],
        "client_kwargs": {"password": SECRETS["proxy password"], "credential": {"a": SECRETS["session token"]}},
    }
    Talkative.failing = False
    Talkative.store.clear()


def test_quotes_no_filesystem_that_quotes_its_options(talkative: dict[str, Any], log: io.StringIO) -> None:
    url, state = "talkative://run/step-1", {"w": torch.ones(3), "step": 1}
    writer, reader = bp.BucketWriter(storage_options=talkative), bp.BucketReader(storage_options=talkative)
    dcp.save(state, checkpoint_id=url, storage_writer=writer, no_dist=True)
    assert len(Talkative.store) >= 3
    for path, file in Talkative.store.items():
        assert_clean(file.getvalue(), path)
    Talkative.failing = True
    for failure in clean_failures(url, talkative, writer, reader):
        assert HIDDEN in str(failure)
    assert_clean(log.getvalue(), "log")


def test_quotes_no_options_that_do_not_fit_a_filesystem(tmp_path: Path) -> None:
    class Picky(MemoryFileSystem):  # type: ignore[misc]
        protocol = "picky"

        def __init__(self, **options: Any) -> None:
            raise self.kind(f"cannot use {options}")

    fsspec.register_implementation("picky", Picky, clobber=True)
    for kind in (TypeError, ValueError):
        Picky.kind = kind
        with pytest.raises(BucketpointError) as caught:
            open_store("picky://x", storage_options={"token": SECRETS["session token"]})
        assert_failure_is_clean(caught.value, kind.__name__)


# URLs


@pytest.mark.parametrize(
    "url",
    ["ftp://me:{}@host/run", "s3://KEY:se/c{}@bucket/run", "sftp://:{}@host/run", "simplecache::ftp://me:{}@host/x"],
)
@pytest.mark.parametrize("own", [False, True], ids=["by its scheme", "with a filesystem"])
def test_refuses_a_password_in_a_url_and_does_not_tell_it(
    url: str, own: bool, capsys: pytest.CaptureFixture[str], log: io.StringIO
) -> None:
    """The URL of a checkpoint is logged, and written into it."""
    url = url.format(SECRETS["url password"])
    with pytest.raises(InvalidURLError, match="password") as caught:
        open_store(url, fs=MemoryFileSystem() if own else None)
    assert_failure_is_clean(caught.value, "open_store")
    for make in (bp.BucketWriter, bp.BucketReader, bp.latest_checkpoint):
        with pytest.raises(InvalidURLError) as refused:
            make(url)  # type: ignore[operator]
        assert_failure_is_clean(refused.value, str(make))
    assert not bp.BucketReader.validate_checkpoint_id(url)
    assert run(["show", url]) != 0
    said = capsys.readouterr()
    assert_clean(said.out + said.err + log.getvalue(), "the program")


def test_accepts_urls_without_a_password() -> None:
    for url in (
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/x",
        "abfs://container@account.dfs.core.windows.net/x",
        "sftp://me@host:22/x",
        "s3://bucket/a:b@c",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/x@2",
        "sftp://host:22/x@y",
        "hdfs://[::1]:9000/x@y",
        "zip://a.ckpt::s3://bucket/x@y",
        "/a/b:c@d",
    ):
        assert not holds_password(url), url


MARK = "S3CR3T"
ODD = st.text("/@:%+=?#&;,~!$'\"\\ aZ0é", max_size=4) | st.sampled_from(["%2F", "%40", "::", "//", "\n"])
PASSWORDS = st.lists(ODD, min_size=1, max_size=4).map(lambda parts: MARK.join(["", *parts, ""]))


@hypothesis.example(password=f"{MARK}::{MARK}://{MARK}", user="AKIAKEY", scheme="simplecache::s3")
@hypothesis.example(password=f"{MARK}@a::{MARK}://{MARK}", user="AKIAKEY", scheme="az")
@hypothesis.given(
    password=PASSWORDS,
    user=st.sampled_from(["AKIAKEY", "", "me%40here"]),
    scheme=st.sampled_from(["s3", "S3A", "gs", "az", "sftp", "https", "simplecache::s3"]),
)
def test_tells_no_password_of_a_url_whatever_it_is_made_of(password: str, user: str, scheme: str) -> None:
    url = f"{scheme}://{user}:{password}@bucket/run/step-1"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(InvalidURLError, match="password") as caught:
            open_store(url)
        assert not bp.BucketReader.validate_checkpoint_id(url)
    finally:
        logging.getLogger().removeHandler(handler)
    error = caught.value
    told = [
        str(error),
        repr(error),
        repr(vars(error)),
        repr(pickle.dumps(error)),
        *(one.getMessage() for one in records),
    ]
    assert not [text for text in told if MARK in text]
    assert error.__context__ is None
    if not re.search(r"[\s\"']", password):
        assert MARK not in clean(f"could not reach {url} in time")


def test_cleans_texts_of_what_is_secret_and_of_nothing_else() -> None:
    assert clean("GET https://me:hush@host/x?sig=hush failed") == "GET https://host/x failed"
    assert hide("token abcdef at us-east-1", {"token": "abcdef", "region": "us-east-1"}) == "token *** at us-east-1"
    # A longer secret goes first, and what is too short to be one stays.
    assert hide("abcdef-1 ab", {"a_key": "abcdef", "b_key": "abcdef-1", "c_key": "ab"}) == "*** ab"
    assert hide("a%2Fb%2Bcd", {"secret": "a/b+cd"}) == HIDDEN


# GCS


def account(server: str) -> dict[str, str]:
    return {
        "type": "service_account",
        "client_email": "trainer@p.iam.gserviceaccount.com",
        "token_uri": f"{server}/token",
        "private_key_id": SECRETS["access key"],
        "private_key": SECRETS["secret key"],
    }


def test_tells_no_secret_in_any_way_of_not_reaching_gcs(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.cloud.storage")
    dead = f"127.0.0.1:{free_port()}"
    proxy = f"http://user:{SECRETS['proxy password']}@{dead}"
    for options, proxied in (
        ({"token": "anon", "endpoint_url": f"http://me:{SECRETS['url password']}@{dead}"}, False),
        ({"token": "anon", "endpoint_url": f"no-url:{SECRETS['url password']}@"}, False),
        ({"token": "anon", "endpoint_url": "https://store.invalid"}, True),
        ({"token": account(f"http://{dead}")}, False),
        ({"token": SECRETS["session token"].replace("/", ".")}, False),
        ({"tokens": SECRETS["session token"]}, False),
    ):
        if proxied:
            monkeypatch.setenv("HTTPS_PROXY", proxy)
        with pytest.raises(BucketpointError) as caught:
            store, _ = open_store("gs://bucket/x", storage_options={**options, "max_attempts": 1})
            assert_clean(repr(store), "repr")
            store.get("k")
        assert_failure_is_clean(caught.value, str(sorted(options)))
        assert "planted" not in str(caught.value)
    assert_clean(log.getvalue(), "log")


@pytest.mark.parametrize("status", [400, 401, 500])
def test_tells_no_token_in_a_failure_of_gcs(status: int, log: io.StringIO) -> None:
    """Not even where the service sends the request's headers back to us, in its own words."""
    credentials = pytest.importorskip("google.oauth2.credentials")
    pytest.importorskip("google.cloud.storage")
    body = json.dumps({"error": {"code": status, "message": "no", "errors": [{"reason": "x", "message": "no"}]}})
    answer = Answer(status, {"Content-Type": "application/json"}, body.encode())
    with scripted(lambda request, number: answer) as server:
        options = {
            "token": credentials.Credentials(SECRETS["session token"]),
            "endpoint_url": server.endpoint,
            "max_attempts": 1,
        }
        writer, reader = bp.GCSWriter(storage_options=options), bp.GCSReader(storage_options=options)
        clean_failures("gs://bucket/run/step-1", options, writer, reader, GCSOptions.from_storage_options(options))
        assert any(SECRETS["session token"] in one.headers.get("authorization", "") for one in server.seen)
    assert_clean(log.getvalue(), "log")


def test_pickles_no_token_in_memory() -> None:
    with pytest.raises(BucketpointError) as caught:
        pickle.dumps(GCSOptions(token=account("https://x")))
    assert_failure_is_clean(caught.value, "pickle")


def test_names_a_file_that_is_not_there_but_no_token_in_its_place(tmp_path: Path) -> None:
    pytest.importorskip("google.cloud.storage")
    for token, told in ((str(tmp_path / "missing"), True), ("ya29.planted-token-of-an-hour", False)):
        with pytest.raises(CredentialsError) as caught:
            open_store("gs://b/x", storage_options={"token": token})[0].get("k")
        assert (token in str(caught.value)) == told
