"""What every store promises, as one list that each passes: S3 on three servers, GCS, a local folder, and fsspec."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums

from bucketpoint.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CorruptDataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UploadNotFoundError,
)
from bucketpoint.stores import LocalStore, ObjectInfo, Store, proven, proven_deletes
from bucketpoint.stores.fsspec import FsspecStore
from bucketpoint.stores.gcs import GCSOptions, GCSStore
from bucketpoint.stores.gcs import store as gcs_bucket
from bucketpoint.stores.s3 import S3Options, S3Store
from bucketpoint.stores.s3 import store as s3_store
from fsspec_backends import SERVED, Backend, backend
from gcs_server import GCSServer
from kit.buffers import room, views
from kit.servers import S3Server

pytestmark = pytest.mark.contract

MIB = 1 << 20

ODD_KEYS = [
    "plain",
    "with space/and more",
    "plus+plus",
    "hash#tag",
    "percent%41%2F%",
    "question?x=1&y=2",
    "brackets[0]/[a-z]",
    "star*/*",
    "ünïcode/テスト/🔥",
    "quote'double\"",
    "a=b,c;d:e@f$g!",
    "dash-before/slash",
    "tilde~(paren)",
    ".metadata",
]


@dataclass
class Case:
    """A store under test, and what to expect of it where stores may differ."""

    store: Store
    part_bytes: int = 1000
    keeps_double_slashes: bool = True
    refuses_double_slashes: bool = False
    """MinIO keeps objects as files, and would rather say no than fold the slashes."""
    verifies: bool = False
    """Whether this server looks at checksums: moto takes any."""
    knows_gone_uploads: bool = True
    """moto answers 500 for them."""
    takes_parts_of_gone_uploads: bool = False
    conditional_delete: bool = True
    expiring_delete: bool = False
    ignores_delete_conditions: bool = False
    """As fake-gcs-server does."""
    ignores_copy_conditions: bool = False
    """As moto and fake-gcs-server do: tests with a scripted reply show the refusal there."""
    left_behind: Callable[[], list[str]] = field(default=list)
    """Names of everything there, temporary things and open uploads included."""


def s3_case(server: S3Server, **options: str) -> Case:
    bucket = server.make_bucket()
    return Case(
        S3Store(bucket, S3Options.from_storage_options({**server.options, **options})),
        part_bytes=5 * MIB,
        keeps_double_slashes=server.kind != "versitygw",
        refuses_double_slashes=server.kind == "minio",
        verifies=server.kind != "moto",
        knows_gone_uploads=server.kind != "moto",
        conditional_delete=server.kind != "minio",
        expiring_delete=server.kind != "moto",
        ignores_copy_conditions=server.kind == "moto",
        left_behind=lambda: server.keys(bucket) + server.open_uploads(bucket, "up/load"),
    )


def gcs_case(server: GCSServer) -> Case:
    bucket = server.make_bucket()
    return Case(
        GCSStore(bucket, GCSOptions.from_storage_options(server.options)),
        verifies=True,
        ignores_delete_conditions=server.kind == "fake",
        ignores_copy_conditions=True,
        part_bytes=5 * MIB,
        left_behind=lambda: server.keys(bucket) + server.open_uploads(bucket),
    )


def everything_below(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]


def put_and_die(store: Store, key: str) -> None:
    """Begin to write an object in a process that ends before the object has its name."""
    child = os.fork()
    if not child:
        os.fsync = lambda fd: os._exit(9)
        store.put(key, views(b"half"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def begin_and_die(store: Store, key: str, call: int) -> bool:
    """Begin an upload in a process that is killed after its `call`-th call of the system. False if it ends before."""
    if not (child := os.fork()):
        calls = itertools.count(1)

        def die(frame: object, event: str, of: object) -> None:
            changes = getattr(of, "__module__", "") == "posix" or hasattr(getattr(of, "__self__", None), "fileno")
            if event == "c_return" and changes and next(calls) == call:
                os._exit(9)

        try:
            sys.setprofile(die)
            store.create_multipart(key)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def fsspec_case(found: Backend) -> Case:
    return Case(
        FsspecStore(found.fs, found.root),
        part_bytes=5 * MIB if found.name == "s3fs" else 1000,
        keeps_double_slashes=found.name != "dir",
        refuses_double_slashes=found.name == "s3fs",
        verifies=found.checks,
        conditional_delete=False,
        # Azure drops what a name's next write does not list, and takes blocks at any time.
        takes_parts_of_gone_uploads=found.name == "adlfs",
        left_behind=found.left_behind,
    )


BACKENDS = ["memory", "dir", *SERVED]
KINDS = ["moto", "minio", "versitygw", "gcs", "gcs_xml", "local", *BACKENDS]
in_parts = pytest.mark.parametrize(
    "case", [kind for kind in KINDS if kind not in ("gcs", "memory", "dir", "gcsfs")], indirect=True
)

conditions = pytest.mark.parametrize("case", [*KINDS, "ceph"], indirect=True)
"""Ceph has none for puts: this side looks before it writes."""


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    if request.param in ("moto", "minio"):
        yield s3_case(request.getfixturevalue(request.param))
    elif request.param == "versitygw":
        yield s3_case(request.getfixturevalue("versitygw"), service="versitygw")
    elif request.param == "ceph":
        yield s3_case(request.getfixturevalue("minio"), service="ceph")
    elif request.param in ("gcs", "gcs_xml"):
        yield gcs_case(request.getfixturevalue(request.param))
    elif request.param == "local":
        yield Case(
            LocalStore(str(tmp_path)), keeps_double_slashes=False, left_behind=lambda: everything_below(tmp_path)
        )
    else:
        with backend(request.param, request, tmp_path) as found:
            yield fsspec_case(found)


@pytest.fixture
def store(case: Case) -> Store:
    proven(case.store, "")
    return case.store


def test_reads_and_replaces_what_was_put_back_whole_also_through_a_pickle(store: Store) -> None:
    info = store.put("a/b", views(b"hello ", b"", b"world"))
    data, found = store.get("a/b")
    assert data == b"hello world"
    assert (found.key, found.size, found.etag) == ("a/b", 11, info.etag)
    assert store.head("a/b").size == 11
    assert store.head("a/b").etag == info.etag is not None
    second = store.put("a/b", views(b"two"))
    assert store.get("a/b")[0] == b"two"
    assert info.etag != second.etag
    store.put("empty", [], crc32c=0)
    assert store.get("empty")[0] == b""
    assert store.head("empty").size == 0
    many = bytes(range(250)) * 20
    store.put("many", [memoryview(many)[at : at + 1] for at in range(len(many))])
    assert store.get("many")[0] == many
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert again.get("a/b")[0] == b"two"


def test_refuses_a_checksum_that_does_not_fit_the_body_and_writes_nothing(case: Case) -> None:
    store = case.store
    store.put("good", views(b"body"), crc32c=checksums.crc32c(b"body"))
    if not case.verifies:
        pytest.skip("nobody verifies checksums here")
    with pytest.raises(CorruptDataError):
        store.put("bad", views(b"body"), crc32c=checksums.crc32c(b"other"))
    with pytest.raises(ObjectNotFoundError):
        store.head("bad")
    if store.capabilities.multipart:
        upload = store.create_multipart("k")
        with pytest.raises(CorruptDataError):
            store.put_part("k", upload, 1, views(b"body"), crc32c=1)
        store.abort_multipart("k", upload)


def test_reads_the_first_bytes_of_an_object_and_refuses_a_larger_one_than_expected(store: Store) -> None:
    body = bytes(range(100))
    written = store.put("k", views(body))
    store.put("empty", views(b""))
    for first in (1, 99, 100, 101, 5000):
        data, info = store.get("k", max_bytes=5000, first=first)
        assert (data, info.size, info.etag) == (body[:first], 100, written.etag)
        data, info = store.get("empty", first=first)
        assert (data, info.size) == (b"", 0)
        with pytest.raises(ObjectNotFoundError):
            store.get("absent", first=first)
    assert store.get("k", max_bytes=100)[1].size == 100
    with pytest.raises(CorruptDataError):
        store.get("k", max_bytes=99)
    assert store.get("k")[0] == body


def test_returns_odd_keys_exactly(store: Store) -> None:
    for key in ODD_KEYS:
        store.put(key, views(key.encode()))
        assert store.get(key)[0] == key.encode()
        assert store.head(key).key == key
        assert [info.key for info in store.list("")] == [key]
        assert [info.key for info in store.list(key)] == [key]
        assert [info.key for info in store.list(key[:-1])] == [key]
        buffer, views_ = room(len(key.encode()))
        store.read_into(key, 0, views_)
        assert bytes(buffer) == key.encode()
        store.copy(store.head(key), "copies/" + key)
        assert store.get("copies/" + key)[0] == key.encode()
        assert store.delete([key, "copies/" + key]) == []
        assert list(store.list("")) == []
        if store.capabilities.multipart:
            upload = store.create_multipart(key)
            part = store.put_part(key, upload, 1, views(b"abc"))
            store.complete_multipart(key, upload, [part])
            assert store.get(key)[0] == b"abc"
            assert store.delete([key]) == []


def test_writes_and_reads_two_slashes_in_a_row_as_given(case: Case) -> None:
    store = case.store
    if case.refuses_double_slashes:
        with pytest.raises(StoreError):
            store.put("a//b", views(b"x"))
        return
    store.put("a//b", views(b"x"))
    assert store.get("a//b")[0] == b"x"
    if case.keeps_double_slashes:
        assert [info.key for info in store.list("a/")] == ["a//b"]


def test_receives_ranges_into_the_callers_buffers_and_refuses_one_beyond_the_end(store: Store) -> None:
    content = bytes(range(256)) * 1024
    store.put("k", views(content))
    for offset, sizes in [
        (0, [len(content)]),
        (1, [1]),
        (len(content) - 1, [1]),
        (7, [1, 0, 3, 100_003, 5, 70_000, 1]),
        (1000, [10] * 5000),
        (3, [40_000, 1, 40_000, 2, 3]),
        (3, []),
        (3, [0]),
    ]:
        memory = bytearray(b"\xaa" * (sum(sizes) + 2 * len(sizes)))
        buffers, at = [], 0
        for size in sizes:
            buffers.append(memoryview(memory)[at : at + size])
            at += size + 2
        store.read_into("k", offset, buffers)
        assert b"".join(buffers) == content[offset : offset + sum(sizes)]
        # Nothing between the buffers is touched.
        assert memory[at - 2 :] == b"\xaa\xaa"[: len(memory)]
    for offset, size in [(len(content) - 5, 6), (len(content), 1), (2 * len(content), 10), (0, len(content) + 1)]:
        with pytest.raises(CorruptDataError):
            store.read_into("k", offset, room(size)[1])


def test_refuses_a_replaced_object_in_a_pinned_read(store: Store) -> None:
    first = store.put("k", views(b"0123456789"))
    data, buffers = room(10)
    store.read_into("k", 0, buffers, if_match=first.etag)
    assert bytes(data) == b"0123456789"
    store.put("k", views(b"9876543210"))
    with pytest.raises(PreconditionFailedError):
        store.read_into("k", 0, buffers, if_match=first.etag)


def test_raises_object_not_found_for_a_missing_key(store: Store) -> None:
    gone = store.put("missing", views(b"x"))
    store.delete(["missing"])
    for call in (
        lambda: store.get("missing"),
        lambda: store.head("missing"),
        lambda: store.read_into("missing", 0, room(1)[1]),
        lambda: store.copy(ObjectInfo("missing", 1), "target"),
        lambda: store.copy(gone, "target"),
    ):
        with pytest.raises(ObjectNotFoundError) as caught:
            call()
        assert "missing" in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        if isinstance(store, S3Store | GCSStore):
            # The client library's exceptions hold the request, headers and all.
            assert caught.value.__context__ is None


@conditions
def test_replaces_only_the_object_that_a_conditional_put_names(store: Store) -> None:
    first = store.put("k", views(b"first"), if_none_match=True)
    with pytest.raises(PreconditionFailedError):
        store.put("k", views(b"not the first"), if_none_match=True)
    assert store.get("k")[0] == b"first"
    second = store.put("k", views(b"second"), if_match=first.etag)
    with pytest.raises(PreconditionFailedError):
        store.put("k", views(b"third"), if_match=first.etag)
    assert store.get("k")[0] == b"second"
    assert store.head("k").etag == second.etag
    with pytest.raises(PreconditionFailedError):
        store.put("gone", views(b"x"), if_match=first.etag)
    with pytest.raises(ObjectNotFoundError):
        store.head("gone")


@pytest.mark.parametrize("over", [False, True], ids=["create only", "if match"])
def test_lets_one_of_concurrent_conditional_puts_win(store: Store, over: bool) -> None:
    if not store.capabilities.conditional_put or (over and not store.capabilities.conditional_replace):
        pytest.skip("this store does not claim atomic conditions")
    condition: dict[str, Any] = {"if_match": store.put("k", views(b"base")).etag} if over else {"if_none_match": True}
    start = threading.Barrier(8)

    def attempt(number: int) -> bool:
        start.wait()
        try:
            store.put("k", views(b"%d" % number), **condition)
        except PreconditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert won.count(True) == 1
    assert store.get("k")[0] == b"%d" % won.index(True)


@in_parts
def test_joins_parts_sent_in_any_order_and_with_gaps_by_their_numbers(case: Case) -> None:
    store, size = case.store, case.part_bytes
    bodies = {2: b"a" * size, 5: b"b" * size, 9: b"c" * 17}
    upload = store.create_multipart("up/load")
    store.put_part("up/load", upload, 5, views(b"replaced by the one that is sent again"))
    parts = []
    for number in (9, 2, 5):
        half = len(bodies[number]) // 2
        body = views(bodies[number][:half], bodies[number][half:])
        parts.append(store.put_part("up/load", upload, number, body, crc32c=checksums.crc32c(bodies[number])))
    with pytest.raises(ObjectNotFoundError):
        store.head("up/load")
    assert list(store.list("")) == []
    info = store.complete_multipart("up/load", upload, parts)
    whole = b"".join(bodies.values())
    assert store.get("up/load")[0] == whole
    assert info.size == store.head("up/load").size == len(whole)
    assert info.etag == store.head("up/load").etag
    assert len(case.left_behind()) == 1


@in_parts
def test_leaves_nothing_of_an_aborted_upload_and_neither_completes_nor_feeds_it(case: Case) -> None:
    store, gone = case.store, UploadNotFoundError if case.knows_gone_uploads else StoreError
    upload = store.create_multipart("up/load")
    part = store.put_part("up/load", upload, 1, views(b"x" * 100))
    assert [(open_.key, open_.upload_id) for open_ in store.list_multipart("up/load")] == [("up/load", upload)]
    store.abort_multipart("up/load", upload)
    store.abort_multipart("up/load", upload)
    assert case.left_behind() == []
    assert list(store.list_multipart("up/load")) == []
    with pytest.raises(gone):
        store.complete_multipart("up/load", upload, [part])
    assert list(store.list("")) == []
    if case.takes_parts_of_gone_uploads:
        store.put_part("up/load", upload, 2, views(b"y"))
        assert [open_.upload_id for open_ in store.list_multipart("up/load")] == [upload]
        return
    with pytest.raises(gone):
        store.put_part("up/load", upload, 2, views(b"y"))


def test_lists_keys_by_prefix_in_order_and_each_folder_once(store: Store) -> None:
    keys = ["a/1", "a/10", "a/2", "a/b/c", "a-b", "ab/x", "b"]
    for key in keys:
        store.put(key, views(key.encode()))
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("a/")] == ["a/1", "a/10", "a/2", "a/b/c"]
    assert [info.key for info in store.list("a/1")] == ["a/1", "a/10"]
    assert [info.key for info in store.list("none/")] == []
    described = next(iter(store.list("a/10")))
    assert (described.size, described.etag) == (4, store.head("a/10").etag)
    assert described.modified is None or described.modified > 1e9
    for key in ["run/step-1/.metadata", "run/step-1/data/x", "run/step-10/y", "run/step 2/z", "run/file"]:
        store.put(key, views(b"x"))
    assert list(store.list_folders("run/")) == ["run/step 2/", "run/step-1/", "run/step-10/"]
    assert list(store.list_folders("")) == ["a/", "ab/", "run/"]
    assert list(store.list_folders("none/")) == []


def test_lists_more_than_a_page_and_deletes_more_than_a_thousand_keys(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = case.store
    # Pages of other stores are no business of ours.
    monkeypatch.setattr(gcs_bucket, "MAX_PAGE_KEYS", 50)
    if isinstance(store, S3Store):
        store = S3Store(store.bucket, store.options.replace(request_kwargs={"MaxKeys": 50}))
    keys = [f"many/{number:04}" for number in range(103)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.put(key, views(b"x")), keys))
    assert [info.key for info in store.list("many/")] == keys
    never = [f"never/{number:04}" for number in range(1000)]
    assert store.delete([*keys[:50], *never, *keys[50:-1]]) == []
    assert [info.key for info in store.list("")] == keys[-1:]
    assert store.delete([]) == []


def test_deletes_on_condition_only_the_object_that_it_names(case: Case) -> None:
    store = case.store
    able = proven_deletes(store, "run")
    assert (able.conditional_delete, able.expiring_delete) == (case.conditional_delete, case.expiring_delete)
    assert able == store.capabilities
    assert case.left_behind() == []
    first = store.put("run/k", views(b"first"))
    second = store.put("run/k", views(b"second, and longer"))
    assert first.etag is not None
    assert second.etag is not None
    if not case.ignores_delete_conditions:
        with pytest.raises(PreconditionFailedError):
            store.delete_if("run/k", first.etag)
        assert store.get("run/k")[0] == b"second, and longer"
    store.delete_if("run/k", second.etag)
    assert list(store.list("run/k")) == []
    store.delete_if("run/k", second.etag)
    store.delete_if("run/none/there", second.etag)
    assert case.left_behind() == []


def test_makes_an_object_of_its_own_by_a_copy_also_of_a_source_without_an_etag(store: Store) -> None:
    store.put("from/a b", views(b"content"))
    info = store.copy(store.head("from/a b"), "to/c+d")
    assert info.size == 7
    assert info.etag == store.head("to/c+d").etag
    store.copy(ObjectInfo("from/a b", 7), "copied")
    store.delete(["from/a b"])
    assert store.get("to/c+d")[0] == store.get("copied")[0] == b"content"


def test_refuses_a_copy_of_a_replaced_object_and_leaves_nothing(case: Case) -> None:
    store = case.store
    proven(store, "")
    first = store.put("k", views(b"0123456789"))
    copied = store.copy(first, "copied")
    store.put("k", views(b"9876543210"))
    if case.ignores_copy_conditions:
        assert store.get(store.copy(first, "refused").key)[0] == b"9876543210"
        return
    for target in ("refused", "copied"):
        with pytest.raises(PreconditionFailedError, match=r"[/:]k\b"):
            store.copy(first, target)
    with pytest.raises(ObjectNotFoundError):
        store.head("refused")
    assert store.head("copied").etag == copied.etag
    assert store.get("copied")[0] == b"0123456789"
    assert sorted(info.key for info in store.list("")) == ["copied", "k"]


def test_names_a_missing_bucket_and_never_makes_it(case: Case) -> None:
    if not isinstance(case.store, S3Store | GCSStore):
        pytest.skip("this store has no buckets")
    nowhere = dataclasses.replace(case.store, bucket="no-such-bucket-here")
    for call in (
        lambda: nowhere.put("k", views(b"x")),
        lambda: nowhere.get("k"),
        lambda: nowhere.create_multipart("k") if nowhere.capabilities.multipart else nowhere.head("k"),
        lambda: list(nowhere.list("")),
        lambda: nowhere.delete(["k"]),
        lambda: nowhere.put("k", views(b"x")),
    ):
        with pytest.raises(BucketNotFoundError, match="to save, create") as caught:
            call()
        assert (caught.value.url or "").startswith(nowhere.url)


class TestS3:
    """What only S3 can get wrong."""

    @pytest.fixture
    def store(self, minio: S3Server) -> S3Store:
        return S3Store(minio.make_bucket(), S3Options.from_storage_options(minio.options))

    def test_copies_in_parts_beyond_the_limit_of_one_request(
        self, minio: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = b"0123456789abcdef" * (11 * MIB // 16)
        store.copy(store.put("big", views(content)), "copied at once")
        head = minio.client().head_object
        assert len({head(Bucket=store.bucket, Key=key)["ContentType"] for key in minio.keys(store.bucket)}) == 1
        monkeypatch.setattr(s3_store, "SILENT_COPY_BYTES", 5 * MIB)
        info = store.copy(store.head("big"), "copy of big")
        assert store.get("copy of big")[0] == content
        assert info.size == len(content)
        assert store.head("copy of big").etag == info.etag
        assert info.etag is not None
        assert info.etag.endswith("-3")

    def test_leaves_no_upload_of_a_copy_in_parts_that_fails(
        self, minio: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replaced = store.put("big", views(b"0" * (6 * MIB)))
        info = store.put("big", views(b"1" * (6 * MIB)))
        monkeypatch.setattr(s3_store, "SILENT_COPY_BYTES", 5 * MIB)
        with pytest.raises(PreconditionFailedError, match="/big"):
            store.copy(replaced, "target")
        # Parts below the service's minimum: completing is refused after the copies were made.
        monkeypatch.setattr(s3_store, "SILENT_COPY_BYTES", MIB)
        with pytest.raises(StoreError):
            store.copy(info, "target")
        assert minio.open_uploads(store.bucket, "target") == []
        assert minio.keys(store.bucket) == ["big"]


class TestSignedDeletes:
    """moto looks at no expiry, so it is not among these."""

    @pytest.mark.parametrize("kind", ["minio", "versitygw"])
    def test_deletes_if_the_request_arrives_in_time_and_refuses_a_later_one(
        self, kind: str, request: pytest.FixtureRequest
    ) -> None:
        server: S3Server = request.getfixturevalue(kind)
        # The header is one that has to be signed and sent.
        given = {"service": kind, "s3_additional_kwargs": {"RequestPayer": "requester"}}
        store = S3Store(server.make_bucket(), S3Options.from_storage_options({**server.options, **given}))
        assert store.capabilities.expiring_delete
        key = "run/with space+plus/ünïcode"
        store.put(key, views(b"x"))
        in_time, late = store.expiring_delete(key, 60), store.expiring_delete(key, 1)
        assert in_time()
        assert server.keys(store.bucket) == []
        assert in_time()
        store.put(key, views(b"y"))
        time.sleep(2.1)
        assert late() is False
        assert store.get(key)[0] == b"y"
        assert "Signature" not in repr(late)

    def test_tries_a_service_of_which_nothing_is_known_once(
        self, moto: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = S3Store(moto.make_bucket(), S3Options.from_storage_options(moto.options))
        assert not store.capabilities.conditional_delete
        able = proven_deletes(store, "run")
        assert able.conditional_delete
        monkeypatch.setattr(S3Store, "_tried", None)
        assert proven_deletes(S3Store(store.bucket, store.options), "run") == able

    def test_raises_for_a_refusal_in_time_and_takes_it_for_none_that_came_too_late(self, minio: S3Server) -> None:
        bucket = minio.make_bucket()
        allowed = {"Effect": "Allow", "Action": ["s3:PutObject"], "Resource": [f"arn:aws:s3:::{bucket}/*"]}
        store = S3Store(bucket, S3Options.from_storage_options(minio.limited_options(allowed)))
        store.put("k", views(b"x"))
        with pytest.raises(AccessDeniedError, match="s3:DeleteObject") as caught:
            store.expiring_delete("k", 60)()
        assert "X-Amz" not in repr(caught.value)
        assert minio.keys(bucket) == ["k"]
        # What is not signed does not expire.
        store = S3Store("bucket", S3Options(endpoint_url=minio.endpoint, anon=True, service="minio"))
        assert not store.capabilities.expiring_delete


class TestDenied:
    """MinIO is the one that checks who asks."""

    def test_reports_each_key_that_may_not_be_deleted_and_deletes_the_others(
        self, minio: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_store, "MAX_DELETE_KEYS", 3)
        bucket = minio.make_bucket()
        owner = S3Store(bucket, S3Options.from_storage_options(minio.options))
        keys = ["open/1", "open/2", "open/3"]
        for key in [*keys, "locked/1", "locked/2"]:
            owner.put(key, views(b"x"))
        allowed = {"Effect": "Allow", "Action": ["s3:*"], "Resource": [f"arn:aws:s3:::{bucket}/open/*"]}
        limited = S3Store(bucket, S3Options.from_storage_options(minio.limited_options(allowed)))
        failures = limited.delete(["locked/1", *keys, "locked/2"])
        assert [(failure.key, failure.code) for failure in failures] == [
            ("locked/1", "AccessDenied"),
            ("locked/2", "AccessDenied"),
        ]
        assert [info.key for info in owner.list("")] == ["locked/1", "locked/2"]


class TestLocal:
    def test_finds_no_object_at_a_key_that_is_a_folder_and_deletes_none(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        store.put("folder/file", views(b"x"))
        store.put("other", views(b"x"))
        for call in (lambda: store.get("folder"), lambda: store.head("folder"), lambda: store.head("folder/file/c")):
            with pytest.raises(ObjectNotFoundError):
                call()
        failures = store.delete(["folder", "other"])
        assert [failure.key for failure in failures] == ["folder"]
        # Linux says that this is a folder, other systems that it is not permitted.
        assert failures[0].code in ("StoreError", "AccessDeniedError")
        assert failures[0].remedy
        assert [info.key for info in store.list("")] == ["folder/file"]

    def test_treats_an_offset_that_no_file_has_as_one_beyond_the_end(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        store.put("k", views(b"content"))
        for offset in (8, 1 << 50, 1 << 62, 1 << 64):
            with pytest.raises(CorruptDataError, match="too short for the range"):
                store.read_into("k", offset, room(4)[1])

    @pytest.mark.parametrize("name", ["with-dashes", "ä" * 40], ids=["dashes", "long"])
    def test_lists_what_a_killed_writer_left_and_aborts_it_by_the_key(self, tmp_path: Path, name: str) -> None:
        store, key = LocalStore(str(tmp_path)), f"a/b/{name}"
        (tmp_path / "a/b").mkdir(parents=True)
        # Another object whose name begins alike, and one that is finished.
        for left in (key, f"{key}-0"):
            put_and_die(store, left)
        store.put("a/done", views(b"x"))
        assert len(everything_below(tmp_path)) == 3
        for prefix in ("", "a/", f"a/b/{name[0]}", key):
            assert sorted(upload.key for upload in store.list_multipart(prefix)) == [key, f"{key}-0"]
        assert [info.key for info in store.list("")] == ["a/done"]
        for upload in list(store.list_multipart("a/")):
            assert upload.started is not None
            store.abort_multipart(upload.key, upload.upload_id)
            store.abort_multipart(upload.key, upload.upload_id)
        assert everything_below(tmp_path) == [str(tmp_path / "a/done")]
        assert not (tmp_path / "a/b").exists()

    def test_lists_and_aborts_an_upload_whose_process_was_killed_at_any_moment(self, tmp_path: Path) -> None:
        store, made = LocalStore(str(tmp_path)), 0
        for call in itertools.count(1):
            if not begin_and_die(store, "a/k", call):
                break
            made += bool(list(tmp_path.rglob(".bucketpoint-*")))
            for upload in store.list_multipart("a/k"):
                store.abort_multipart(upload.key, upload.upload_id)
            assert list(tmp_path.rglob(".bucketpoint-*")) == [], call
        assert 0 < made < call

    def test_writes_a_name_as_long_as_the_filesystem_allows(self, tmp_path: Path) -> None:
        store, longest = LocalStore(str(tmp_path)), "k" * 255
        store.put(longest, views(b"x"))
        assert store.get(longest)[0] == b"x"
        assert everything_below(tmp_path) == [str(tmp_path / longest)]

    def test_removes_folders_with_their_last_object_but_never_the_root(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path / "root"))
        store.put("a/b/c", views(b"x"))
        store.put("a/d", views(b"x"))
        store.delete(["a/b/c"])
        assert not (tmp_path / "root/a/b").exists()
        store.delete(["a/d"])
        assert list((tmp_path / "root").iterdir()) == []

    def test_follows_no_link_to_a_folder_below_the_root(self, tmp_path: Path) -> None:
        outside = LocalStore(str(tmp_path / "outside"))
        outside.put("data", views(b"somebody's"))
        (tmp_path / "real/inside").mkdir(parents=True)
        (tmp_path / "root").symlink_to("real")
        for name, target in (("away", tmp_path / "outside"), ("round", "inside"), ("loop", "."), ("broken", "nowhere")):
            (tmp_path / "real" / name).symlink_to(target)
        store = LocalStore(str(tmp_path / "root"))
        store.put("inside/data", views(b"mine"))
        assert [info.key for info in store.list("")] == ["inside/data"]
        assert list(store.list_folders("")) == ["inside/"]
        assert list(store.list_multipart("")) == []
        for name in ("away", "round", "loop/inside", "broken"):
            for call in (
                lambda key: store.get(key),
                lambda key: store.head(key),
                lambda key: store.read_into(key, 0, room(1)[1]),
                lambda key: store.put(key, views(b"x")),
                lambda key: store.delete_if(key, "some"),
                lambda key: store.copy(store.head("inside/data"), key),
                lambda key: store.create_multipart(key),
                lambda key: list(store.list(key)),
                lambda key: list(store.list_folders(f"{key}/")),
            ):
                with pytest.raises(StoreError, match=f"{name.partition('/')[0]} is a symbolic link") as caught:
                    call(f"{name}/data")
                assert caught.value.remedy
            failures = store.delete([f"{name}/data"])
            assert [(failure.key, failure.code) for failure in failures] == [(f"{name}/data", "StoreError")]
            assert "Name the target of the link" in (failures[0].remedy or "")
        assert outside.get("data")[0] == b"somebody's"
        assert store.get("inside/data")[0] == b"mine"

    def test_refuses_a_key_that_leads_out_of_the_root(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"x")
        store = LocalStore(str(tmp_path / "root"))
        store.put("a/b", views(b"x"))
        for key in ("../secret", "a/../../secret"):
            for call in (store.get, store.head, lambda key: store.put(key, views(b"y"))):
                with pytest.raises(StoreError, match=r"may not contain '\.\.'"):
                    call(key)
            assert [failure.key for failure in store.delete([key])] == [key]
        assert (tmp_path / "secret").read_bytes() == b"x"

    def test_writes_every_folder_that_a_put_makes_to_the_disk_before_it_returns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: set[int] = set()
        fsync = os.fsync

        def noted(fd: int) -> None:
            synced.add(os.fstat(fd).st_ino)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noted)
        LocalStore(str(tmp_path / "new/root")).put("a/b/c", views(b"x"))
        folders = [tmp_path / below for below in ("", "new", "new/root", "new/root/a", "new/root/a/b")]
        assert synced >= {os.stat(path).st_ino for path in folders}

    def test_deletes_on_condition_nothing_that_another_writer_has_just_put(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path))
        for number in range(100):
            etag = store.put("k", views(b"old")).etag or ""
            start = threading.Barrier(2)

            def replace_it(number: int = number, start: threading.Barrier = start) -> None:
                start.wait()
                store.delete(["k"])
                store.put("k", views(b"new %d" % number), if_none_match=True)

            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(replace_it)
                start.wait()
                with contextlib.suppress(PreconditionFailedError):
                    store.delete_if("k", etag)
                done.result()
            assert store.get("k")[0] == b"new %d" % number

    def test_gives_a_folder_that_was_put_back_another_identity(self, tmp_path: Path) -> None:
        store = LocalStore(str(tmp_path / "run"))
        store.put("k", views(b"x"))
        before = store.identity
        assert store.identity == before
        # Made while the other one is there, so that it cannot be given its inode.
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "backup").rename(tmp_path / "run")
        assert store.identity != before
