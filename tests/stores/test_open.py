"""From URLs to stores: what is a key stays a key, whatever is in it."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.asyn import AsyncFileSystem
from hypothesis import given
from hypothesis import strategies as st

import bucketpoint
from bucketpoint import GCSReader, GCSWriter, S3Reader, S3Writer
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.run import run_of
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.cli.app import run
from bucketpoint.convert import plan_conversion
from bucketpoint.errors import BucketpointError, InvalidURLError, StoreError
from bucketpoint.location import Location, parent_and_name
from bucketpoint.retention import Keep, RetentionPolicy
from bucketpoint.stores import LocalStore, ObjectInfo, accepts_url, as_url, open_store, parse_url
from bucketpoint.stores.fsspec import FsspecStore
from bucketpoint.stores.http_store import HttpStore
from bucketpoint.stores.registry import GCS_SCHEMES
from bucketpoint.stores.s3 import S3Store
from kit.failures import failure_of
from kit.servers import s3_attempts

keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda key: not key.endswith("/") and "\0" not in key and not key[-1].isspace()
)
buckets = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", fullmatch=True)


@given(buckets, keys, st.sampled_from(["s3", "s3a", "S3"]), st.sampled_from(["", "/", "//"]))
def test_returns_any_key_from_a_url_as_it_went_in(bucket: str, key: str, scheme: str, end: str) -> None:
    assert parse_url(f"{scheme}://{bucket}/{key}{end}") == (scheme.lower(), bucket, key)


def test_refuses_other_schemes_in_a_class_for_one_and_says_what_to_pass() -> None:
    for url in ("/a/b", "b/c", "gs://b/x", "bucket"):
        with pytest.raises(InvalidURLError, match="s3://"):
            open_store(url, schemes=("s3",))
        assert not accepts_url(url, ("s3",))
    with pytest.raises(InvalidURLError, match=r"s3:// URLs.*gs:// or gcs://; BucketWriter and BucketReader take any"):
        open_store("s3://b/x", schemes=GCS_SCHEMES)
    assert accepts_url("s3://b/x", ("s3",))
    assert accepts_url(Path("/a/b"))
    assert not accepts_url("s3://")
    memory = fsspec.filesystem("memory")
    with pytest.raises(InvalidURLError, match="gs://"):
        open_store("s3://bucket/x", fs=memory, schemes=GCS_SCHEMES)
    assert open_store("memory://x", fs=memory)[0]
    with pytest.raises(BucketpointError, match="asynchronous"):
        open_store("recording://x", fs=AsyncFileSystem(asynchronous=True, loop=asyncio.new_event_loop()))


def test_accepts_a_url_only_if_something_can_serve_it() -> None:
    for url in ("abc://abc.abc", "abc::s3://b/x", "S3FS://b/x", "s4://bucket/run"):
        assert not accepts_url(url)
        with pytest.raises(InvalidURLError, match=r"Pass s3://, gs:// or az://|the scheme before ::|is not installed"):
            open_store(url)
    for url in ("s3://b/x::y", "gs://b/x", "az://b/x", "file:///a", "memory://a", "simplecache::s3://b/x", "a/b"):
        assert accepts_url(url)
    # What only looks like a folded or mistyped URL.
    for url in ("s3://bucket/home/s3:/x", "a:b/c", "./data:x/y", "c:/x", "memory://s3:/x", "run:/x", "dir/s3//x"):
        assert accepts_url(url)
    for url in ("./s3//x", "./s3:x", "/s3//x", "data//x", "s3/x", "s3//", "c:x", "a:b", "dir/s3:x"):
        assert accepts_url(url)


@pytest.mark.parametrize(
    ("writer", "reader", "url", "wanted"),
    [
        (GCSWriter, GCSReader, "s3://bucket/run", "gs:// or gcs://"),
        (GCSWriter, GCSReader, "az://container/run", "gs:// or gcs://"),
        (S3Writer, S3Reader, "gs://bucket/run", "s3:// or s3a://"),
        (S3Writer, S3Reader, "abfs://container@mine.dfs.core.windows.net/run", "s3:// or s3a://"),
        (S3Writer, S3Reader, "memory://x", "s3:// or s3a://"),
    ],
)
def test_refuses_a_url_of_another_store_by_every_way_into_a_class(
    writer: Any, reader: Any, url: str, wanted: str
) -> None:
    state = {"w": torch.zeros(1)}
    ways: list[Callable[[], object]] = [
        lambda: writer(url),
        lambda: reader(url),
        lambda: dcp.save(state, checkpoint_id=url, storage_writer=writer(), no_dist=True),
        lambda: dcp.load(state, checkpoint_id=url, storage_reader=reader(), no_dist=True),
    ]
    for way in ways:
        error = failure_of(way)
        assert isinstance(error, InvalidURLError)
        assert error.url == url
        for part in (f"does not serve {url.partition(':')[0]}:// URLs", f"begins with {wanted}", "BucketWriter"):
            assert part in str(error)


@pytest.mark.parametrize("kind", [S3Writer, S3Reader, GCSWriter, GCSReader, bucketpoint.BucketWriter])
def test_names_storage_options_for_the_keywords_of_fsspec(kind: Any) -> None:
    for keywords, remedy in (
        ({"key": "k", "client_kwargs": {}}, 'storage_options={"key": ..., "client_kwargs": ...}'),
        ({"overwrite": True, "token": "t"}, 'storage_options={"token": ...}'),
        ({"serialization_format": None, "key": "k"}, "convert --to safetensors"),
    ):
        if "overwrite" in keywords and kind in (S3Reader, GCSReader):
            continue
        with pytest.raises(BucketpointError) as caught:
            kind(**keywords)
        assert remedy in str(caught.value)

    class Own(kind):  # type: ignore[misc, valid-type]
        def __init__(self, **keywords: Any) -> None:
            super().__init__()
            self.keywords = keywords

    assert pickle.loads(pickle.dumps(kind())).url is None
    assert Own(key="k").keywords == {"key": "k"}


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("https://bucket.s3.amazonaws.com/run/step-1", "s3://bucket/run/step-1"),
        ("https://my.bucket.s3.eu-central-1.amazonaws.com/run?X-Amz-Signature=0123", "s3://my.bucket/run"),
        ("https://bucket.s3.dualstack.us-west-2.amazonaws.com/run", "s3://bucket/run"),
        ("https://s3.us-west-2.amazonaws.com/bucket/run", "s3://bucket/run"),
        ("http://127.0.0.1:9000/bucket/run", "s3://bucket/prefix, its service's address as endpoint_url"),
        ("https://b.s3-website.us-west-2.amazonaws.com/", "s3://bucket/prefix, its service's address as endpoint_url"),
    ],
)
def test_answers_a_web_address_with_its_url(address: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where fsspec's library for https is not installed.
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    for scheme in ("http", "https"):
        monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, scheme, raising=False)
    for schemes in ((), ("s3", "s3a")):
        with pytest.raises(InvalidURLError) as caught:
            open_store(address, schemes=schemes)
        assert str(caught.value).endswith(f". Pass {url}")
        # A query may be a signature.
        assert "Signature" not in repr(caught.value)


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("bucket/run", "Check the URL (for a bucket: s3://bucket/run)"),
        ("./bucket/run", "Check the URL"),
        ("{tmp}/run", "Check the URL"),
        ("run", "Check the URL"),
    ],
)
def test_advises_the_url_that_a_local_path_with_nothing_may_mean(
    place: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "show"):
        assert run([command, place.format(tmp=tmp_path)]) == 3
        said = capsys.readouterr().err.splitlines()
        assert [line.partition("remedy: ")[2].partition(";")[0] for line in said if "remedy: " in line] == [remedy]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3:/bucket/x", "Pass the URL as text"),
        (Path("s3://bucket/x"), "Pass the URL as text"),
        ("s3//bucket/run", "Pass s3://bucket/run;"),
        ("s3:", "the URL names no bucket"),
    ],
)
def test_refuses_a_folded_or_mistyped_url_by_every_way_in_and_makes_no_folder(
    url: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(1)}, "model.pt")
    state = {"w": torch.zeros(1)}
    policy = RetentionPolicy(Keep(latest=1))
    ways: list[Callable[[], object]] = [
        lambda: bucketpoint.save(state, url),
        lambda: bucketpoint.load(state, url),
        lambda: bucketpoint.latest_checkpoint(url),
        lambda: bucketpoint.CheckpointManager(url, policy=policy),
        lambda: open_checkpoint(url),
        lambda: open_store(url, fs=fsspec.filesystem("file")),
        lambda: dcp.save(state, checkpoint_id=url, storage_writer=bucketpoint.BucketWriter(), no_dist=True),
        lambda: dcp.save(state, storage_writer=bucketpoint.BucketWriter(url), no_dist=True),
        lambda: dcp.load(state, checkpoint_id=url, storage_reader=bucketpoint.BucketReader(), no_dist=True),
        lambda: plan_conversion(url, "out"),
        lambda: plan_conversion("model.pt", url),
    ]
    for number, way in enumerate(ways):
        error = failure_of(way)
        assert isinstance(error, InvalidURLError), number
        assert said in str(error)
    assert not accepts_url(url)
    assert not bucketpoint.BucketWriter.validate_checkpoint_id(url)
    assert not bucketpoint.BucketReader.validate_checkpoint_id(url)
    for command in ("ls", "show", "verify", "gc", "overview", "doctor"):
        assert run([command, str(url)]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


HERE = "{tmp}/run"
ODD: dict[str, str] = {
    # rightly read: the folder, or the bucket and the prefix
    "FILE://{tmp}/run": HERE,
    "File:{tmp}/run": HERE,
    "local:{tmp}/run": HERE,
    "local://{tmp}/run": HERE,
    "file://localhost{tmp}/run": HERE,
    "FILE://LocalHost{tmp}/run/": HERE,
    "file:///{tmp}/run": HERE,
    "{tmp}//run//": HERE,
    "{tmp}/other/../run": HERE,
    "file://{tmp}/./run": HERE,
    "run": HERE,
    "./run": HERE,
    "~/run": HERE,
    "file://{tmp}/a%20b": "{tmp}/a%20b",
    "file://{tmp}/a?b=c#d": "{tmp}/a?b=c#d",
    "{tmp}/a b": "{tmp}/a b",
    "{tmp}/user@host": "{tmp}/user@host",
    "S3://bucket/run": "bucket run",
    "s3a://bucket/run/": "bucket run",
    "s3://bucket/a//b/../c": "bucket a//b/../c",
    "s3://bucket/a%20b?c=d#e": "bucket a%20b?c=d#e",
    "s3://bucket/a\\b": "bucket a\\b",
    "s3://bucket/ a": "bucket  a",
    "s3://bucket": "bucket ",
    "s3://bucket//a//b/": "bucket /a//b",
    "{tmp}/a::b": "{tmp}/a::b",
    "{tmp}/a::b/c::memory/": "{tmp}/a::b/c::memory",
    "file://{tmp}/a::b": "{tmp}/a::b",
    "file:{tmp}/simplecache::memory": "{tmp}/simplecache::memory",
    "./a-1::b": "{tmp}/a-1::b",
    "s3://bucket/a::b": "bucket a::b",
    # refused, with this remedy
    "gs:/bucket/x": "Pass the URL as text",
    "az:/box/x": "Pass the URL as text",
    "memory:/x": "Pass the URL as text",
    "S3:/bucket": "Pass the URL as text",
    "simplecache::s3:/b/x": "Pass the URL as text",
    "{tmp}/s3:/b/x": "Pass the URL as text",
    "s3:bucket/run": "Pass s3://bucket/run;",
    "S3A//bucket": "Pass S3A://bucket;",
    "gs//bucket/run": "Pass gs://bucket/run;",
    "gcs:bucket/run": "Pass gcs://bucket/run;",
    "az//box/run": "Pass az://box/run;",
    "abfss:box/run": "Pass abfss://box/run;",
    "memory:run": "Pass memory://run;",
    "simplecache::s3//b/x": "Pass simplecache::s3://b/x;",
    "s3::bucket/run": "Pass s3://bucket/run;",
    "file::{tmp}/run": "Pass the path without file:",
    "file:": "",
    "file://host{tmp}/run": "file:///data/run",
    "file://127.0.0.1{tmp}/run": "file:///data/run",
    "file://user@localhost{tmp}/run": "file:///data/run",
    "file://run": "file:///data/run",
    "file://./run": "file:///data/run",
    "file://~/run": "file:///data/run",
    "file://": "file:///data/run",
    "file://localhost": "file:///data/run",
    "local://host/run": "file:///data/run",
    "file:run": "Pass the path without file:",
    "file:./run": "Pass the path without file:",
    " file://{tmp}/run": "Remove it",
    "file://{tmp}/run\n": "Remove it",
    "{tmp}/run ": "Remove it",
    " s3://bucket/run": "Remove it",
    "\ts3://bucket/run": "Remove it",
    "s3://bucket/run\r\n": "Remove it",
    " ": "Remove it",
    "\ufeffs3://bucket/run": "without quotes",
    '"s3://bucket/run"': "without quotes",
    "./s3://bucket/run": "without quotes",
    "x://bucket/run": "without quotes",
    "3s://bucket/run": "without quotes",
    "s3:\\bucket\\run": "Pass s3://",
    "C:\\data\\run": "by slashes",
    "data\\run": "by slashes",
    "file://{tmp}\\run": "by slashes",
    "\\\\host\\share": "by slashes",
    "s3://bucket\\run": "s3://bucket/prefix",
    "s3://bucket?versionId=1": "s3://bucket/prefix",
    "s3://bucket#run": "s3://bucket/prefix",
    "s3://user@bucket/run": "s3://bucket/prefix",
    "s3://bucket:9000/run": "endpoint_url",
    "s3://user:password@bucket/run": "Pass the password in storage_options",
    "s3://a b/run": "s3://bucket/prefix",
    "s3://../run": "s3://bucket/prefix",
    "s3://": "s3://bucket/prefix",
    "S3:///run": "s3://bucket/prefix",
    "gs://bu%63ket/run": "gs://bucket/prefix",
    "gs://": "gs://bucket/prefix",
    "": "s3://bucket/prefix",
    "\0": "s3://bucket/prefix",
}


@pytest.mark.parametrize("given", ODD)
def test_reads_an_odd_url_rightly_or_refuses_it_with_a_remedy(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    url, expected = given.format(tmp=tmp_path), ODD[given].format(tmp=tmp_path)
    if accepts_url(url):
        store, prefix = open_store(url)
        place = store.root if isinstance(store, LocalStore) else f"{store.bucket} {prefix}"  # type: ignore[attr-defined]
        assert place == expected
        if isinstance(store, LocalStore):
            # The same through a filesystem of the caller, in listings of the run, and as the id of a checkpoint.
            assert open_store(url, fs=fsspec.filesystem("file"))[0] == store
            assert open_store(url, storage_options={"auto_mkdir": True})[0] == store
            assert open_catalog(url).store == store
            bucketpoint.save({"w": torch.zeros(1)}, url)
            assert (Path(expected) / ".metadata").exists()
        return
    with pytest.raises(InvalidURLError) as caught:
        open_store(url)
    assert expected in (caught.value.remedy or "")
    assert "password@" not in str(caught.value)
    for way in (
        lambda: bucketpoint.save({"w": torch.zeros(1)}, url),
        lambda: bucketpoint.latest_checkpoint(url),
        lambda: open_store(url, fs=fsspec.filesystem("file")),
    ):
        failure_of(way)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    ["a-1::b", "exp::old/run", "SimpleCache::memory://a", "memory::a", "memory://a::b/c", "zip::memory://a::b/c"],
)
def test_refuses_a_url_that_fsspec_would_end_at_two_colons(url: str) -> None:
    with pytest.raises(InvalidURLError, match="Check the scheme before ::"):
        open_store(url)
    assert isinstance(open_store("simplecache::memory://a")[0], FsspecStore)


def test_refuses_a_run_whose_steps_a_chained_url_cannot_name(tmp_path: Path) -> None:
    url = f"dir://run::file://{tmp_path}"
    bucketpoint.save({"w": torch.zeros(1)}, url)
    for way in (lambda: open_catalog(url), lambda: run_of(Location.of(f"dir://step-1::file://{tmp_path}/run"))):
        with pytest.raises(InvalidURLError, match="path before ::"):
            way()
    assert open_catalog(f"simplecache::file://{tmp_path}/run").url_of(1)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "memory"])
def test_refuses_half_a_character_in_the_name_of_an_object_but_not_of_a_file(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidURLError, match=r"half a character.*Write the name in UTF-8"):
        open_store(f"{scheme}://bucket/r\udc80n")
    assert open_store(f"{tmp_path}/r\udc80n")[0].url.endswith("r\udc80n")


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
@pytest.mark.parametrize("between", [":", "/"])
def test_takes_both_forms_of_an_access_points_arn_for_one_place(scheme: str, between: str) -> None:
    point = "arn:aws:s3:us-west-2:123456789012:accesspoint"
    bucket, url = f"{point}:name", f"{scheme}://{point}{between}name/run/step-1"
    assert parse_url(url) == (scheme, bucket, "run/step-1")
    assert parse_url(f"{scheme}://{point}{between}name") == (scheme, bucket, "")
    assert as_url(url) == f"{scheme}://{bucket}/run/step-1"
    store, prefix = open_store(url, storage_options={"key": "k", "secret": "s"})
    assert (store.url, store.identity, prefix) == (f"s3://{bucket}", f"s3://{bucket}", "run/step-1")
    catalog = open_catalog(f"{scheme}://{point}{between}name/run")
    assert catalog.url_of(1) == as_url(url)
    assert catalog.folder_of(as_url(url) or "") == ("step-1", 1)
    assert parent_and_name(url) == (f"{scheme}://{bucket}/run", "step-1")
    assert parent_and_name(f"{scheme}://{point}{between}name") is None


def test_leaves_what_only_resembles_an_access_point_as_it_is_and_refuses_other_arns() -> None:
    point = "arn:aws:s3:us-west-2:123456789012:accesspoint"
    for url in (f"s3://bucket/{point}/name", f"gs://{point}/name", f"s3://{point}/", f"/a/s3://{point}/name"):
        assert as_url(url) == url.rstrip("/")
    for arn in (
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/name",
        "arn:aws:s3-outposts:us-west-2:123456789012:outpost:op-1:accesspoint:name",
        "arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/name",
        "arn:aws:s3:::bucket",
    ):
        with pytest.raises(InvalidURLError, match="not the ARN of an access point") as caught:
            parse_url(f"s3://{arn}/run")
        assert "Object Lambda" in str(caught.value.remedy)


def test_names_an_access_point_in_a_copy_as_amazon_does(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"key": "k", "secret": "s", "region": "us-west-2", **s3_attempts(1)}
    point = "arn:aws:s3:us-west-2:123456789012:accesspoint/name"
    store, _ = open_store(f"s3://{point}", storage_options=options)
    assert isinstance(store, S3Store)
    sent: list[Any] = []

    def refuse(request: Any, **_: Any) -> None:
        sent.append(request)
        raise InterruptedError

    store.client.api.meta.events.register_first("before-send.s3", refuse)
    with pytest.raises(StoreError):
        store.copy_from(store, ObjectInfo("a", 1), "b")
    assert unquote(sent[0].headers["x-amz-copy-source"].decode()) == f"{point}/object/a"
    assert sent[0].url == "https://name-123456789012.s3-accesspoint.us-west-2.amazonaws.com/b"


@pytest.mark.parametrize("name", ["plain", "with space", "b[ra]c*k?t", "per%41cent", "ha#sh"])
def test_takes_local_paths_and_file_urls_for_the_same_place(tmp_path: Path, name: str) -> None:
    texts = (f"file://{tmp_path}/{name}", f"local:{tmp_path}/{name}", f"{tmp_path}/{name}/")
    for url in (*texts, *map(Path, texts), PurePosixPath(tmp_path, name)):
        store, prefix = open_store(url)
        assert isinstance(store, LocalStore)
        assert (store.root, prefix) == (f"{tmp_path}/{name}", "")
    store.put("k", [memoryview(b"x")])
    assert (tmp_path / name / "k").read_bytes() == b"x"


def test_fixes_a_relative_path_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store, _ = open_store("run/step-1")
    monkeypatch.chdir("/")
    store.put("k", [memoryview(b"x")])
    assert (tmp_path / "run/step-1/k").exists()


def test_opens_other_schemes_through_fsspec_with_their_options(tmp_path: Path) -> None:
    store, prefix = open_store("memory://some/place")
    assert isinstance(store, FsspecStore)
    assert (store.root, prefix) == ("/some/place", "")
    store, _ = open_store(f"dir://{'x'}", storage_options={"path": str(tmp_path), "target_protocol": "file"})
    store.put("a/b", [memoryview(b"x")])
    assert (tmp_path / "x/a/b").read_bytes() == b"x"


def test_uses_a_filesystem_of_the_callers_own_whatever_the_url_says(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    store, prefix = open_store("memory://own/place", fs=memory)
    assert isinstance(store, FsspecStore)
    assert store.fs is memory
    assert prefix == ""
    local, _ = open_store(f"file://{tmp_path}", fs=fsspec.filesystem("file"))
    assert isinstance(local, LocalStore)
    folder = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
    inner, _ = open_store("inside", fs=folder)
    inner.put("k", [memoryview(b"x")])
    assert (tmp_path / "inside/k").read_bytes() == b"x"


@pytest.mark.parametrize(("service", "scheme"), [("s3", "s3"), ("gcs", "gs"), ("gcs", "gcs")])
def test_makes_no_request_and_no_client_by_opening_a_store(
    service: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> object:
        raise AssertionError("a client was made")

    monkeypatch.setattr(f"bucketpoint.stores.{service}.client.build_client", refuse)
    store, prefix = open_store(
        f"{scheme}://never-there/run [1]/*/x/", storage_options={"endpoint_url": "http://127.0.0.1:1"}
    )
    assert isinstance(store, HttpStore)
    assert (store.bucket, prefix) == ("never-there", "run [1]/*/x")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/run", {"key": "id", "secret": "s", "token": "hush-hush\n", "endpoint_url": "http://127.0.0.1:1"}),
        ("s3://bucket/run", {"client_kwargs": {"aws_secret_access_key": "hush-hush", "wrong": 1}}),
        ("s3://bucket/run", {"key": "id", "secret": "s", "endpoint_url": "http://user:hush-hush@127.0.0.1:port"}),
        ("gs://bucket/run", {"token": "anon", "endpoint_url": "http://user:hush-hush/x@127.0.0.1:1"}),
        ("gs://bucket/run", {"token": "hush-hush"}),
        ("s3://bucket/run", {"key": "id", "secret": b"hush-hush"}),
        ("s3://bucket/run", {"key": "id", "secret": "s", "token": 12345}),
        ("s3://bucket/run", {"region": 7}),
        ("s3://bucket/run", {"client_kwargs": {"aws_access_key_id": "id", "aws_secret_access_key": b"hush-hush"}}),
        ("gs://bucket/run", {"token": "anon", "user_agent": 5}),
        ("ftp://127.0.0.1:1/run", {"username": "user", "password": "hush-hush"}),
    ],
)
def test_names_the_remedy_and_no_secret_of_options_that_cannot_be_used(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(BucketpointError) as caught:
        bucketpoint.latest_checkpoint(url, storage_options=options)
    assert caught.value.remedy
    assert "hush" not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
