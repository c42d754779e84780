"""Whatever the bytes: each reader raises an error of ours or returns, and allocates no more than a bound."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import pickle
import posixpath
import resource
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner

from bucketpoint.catalog import lock, tombstones
from bucketpoint.dcp.decode import decode_item, load_bytes
from bucketpoint.errors import BucketpointError, InvalidURLError
from bucketpoint.format import keys
from bucketpoint.format.catalogue import AttemptKey, CommitKey, NoteKey, StepTemplate, UploadKey, content_of, decode
from bucketpoint.format.frames import probe_frame, tensor_frame
from bucketpoint.format.index_ref import find_ref
from bucketpoint.format.index_view import decode_index
from bucketpoint.format.metadata import decode_metadata, extra, record_of
from bucketpoint.format.record import CommitRecord
from bucketpoint.format.pickles.items import refused_globals
from bucketpoint.format.storage_info import ItemInfo, read_storage_info
from bucketpoint.retention import from_yaml
from bucketpoint.stores import open_store, parse_url
from bucketpoint.testing.tally import Tally
from fuzz.mutations import INPUTS, mutated
from fuzz.seeds import index_seed, metadata_seeds, policy_seeds

TRACED_BYTES = 24 << 20
"""What Python may allocate for one input, besides a multiple of its length."""

TRACED_FACTOR = 300
RESIDENT_BYTES = 300 << 20
"""What the process may grow by in a whole target: what torch allocates is not traced."""


def whole(data: bytes) -> ItemInfo:
    return ItemInfo("x", 0, len(data), None)


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def framed(tensor: torch.Tensor) -> bytes:
    frame = tensor_frame(tensor.dtype, tensor.shape)
    payload = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return frame.header + payload + frame.trailer


def read_metadata(data: bytes) -> None:
    metadata = decode_metadata(data)
    extra(metadata)
    for info in (metadata.storage_data or {}).values():
        keys.join("prefix", read_storage_info(info).path)
    record_of(metadata, data, metadata_etag=None).to_json()


def read_index(data: bytes) -> None:
    metadata = decode_index(data)
    extra(metadata)
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(name, str)
        assert entry is not None
    for info in (metadata.storage_data or {}).values():
        keys.join("prefix", read_storage_info(info).path)


def read_item(data: bytes) -> None:
    refused = refused_globals(data)
    assert refused is None or isinstance(refused, list)
    load_bytes(memoryview(data), whole(data), None, key="k", trusted=False, planner=DefaultLoadPlanner())


def read_tensor(data: bytes) -> None:
    probe_frame(data)
    decode_item(memoryview(bytearray(data)), whole(data), None, key="k")


def read_record(data: bytes) -> None:
    record = CommitRecord.from_json(data)
    assert CommitRecord.from_json(record.to_json()) == record


def read_catalogue(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    for kind in (CommitKey, AttemptKey, UploadKey, NoteKey):
        found = kind.parse(name)
        assert found is None or found.name() == name or kind is CommitKey or kind is UploadKey
    decode(name)
    keys.parse_data_path(name)
    StepTemplate().step_of(name)
    StepTemplate(name).step_of("step-5")


def read_note(data: bytes) -> None:
    assert isinstance(content_of(data), dict)
    assert lock._expires(data) != "soon"
    assert lock._holder(data) != 5
    assert isinstance(tombstones.state_of(data), str)


def read_policy(data: bytes) -> None:
    from_yaml(data.decode("utf-8", "surrogateescape"), environ={"HOME": "/h", "RUN": "s3://b/r"})


def read_url(data: bytes) -> None:
    url = data.decode("utf-8", "surrogateescape")
    scheme, _, _ = parse_url(url)
    if scheme in ("", "s3", "s3a", "gs", "gcs", "file", "memory") and "::" not in url:
        store, prefix = open_store(url)
        assert store.url
        assert not prefix.endswith("/")


def read_ref(data: bytes) -> None:
    found = find_ref(data)
    assert found is None or keys.parse_data_path(found.path) is not None


def read_path(data: bytes) -> None:
    """A key that is accepted stays below its prefix, however it is normalised."""
    key = keys.join("team/run", data.decode("utf-8", "surrogateescape"))
    for spelling in (key, key.replace("\\", "/"), key.casefold()):
        assert posixpath.normpath(spelling).startswith("team/run/") or posixpath.normpath(spelling) == "team/run"


@dataclass(frozen=True)
class Target:
    read: Callable[[bytes], None]
    seeds: Sequence[bytes]
    share: float = 1.0


RECORD = CommitRecord(token="0123456789ab", created=1.5, bytes=5, groups={"model": 5}, metrics={"a": math.inf}, step=3)
KEYS = [
    CommitKey(5, 1.5, "0123456789ab", "full", "0a0b0c0d", "step-5", {"model": 3, "optim": 4}).name(),
    AttemptKey(5, "0123456789ab", "sub/step 5").name(),
    UploadKey(5, "0123456789ab", 3, "step-5").name(),
    NoteKey(5, "metrics", ("eval/loss", "ü", "")).name(),
    keys.data_path("0123456789ab", 3, "model", 7),
    "step-{step:08d}",
    "runs/{step}/x",
]
NOTES = [
    b'{"expires": 1790000000.5, "holder": "pruner-1"}',
    b'{"reason": "latest", "state": "begun"}',
    b'{"run": "mine", "version": 1}',
    b'{"paths": ["data/00/0123456789ab-0-model-0.distcp"]}',
]
URLS = [
    *("s3://bucket/a/b", "s3a://bucket//x/", "file:///tmp/x", "memory://x/y"),
    *("/tmp/a b", "gs://b/k?x=1#y", "s3://b", "C:\\x", "sftp://user:word@host/x"),
]
PATHS = [
    *("data/00/0123456789ab-0-model-0.distcp", "../../etc/passwd", "a/../../b", "/abs"),
    *("s3://other/x", "a\\..\\b", "./a//b", "a/.."),
]
ITEMS = [
    saved({"step": 5, "rng": torch.get_rng_state(), "x": [1, (2, "y"), {3.5}]}),
    saved([torch.ones(3)], _use_new_zipfile_serialization=False),
    pickle.dumps({"a": [1, b"x", bytearray(b"y")], "d": range(5)}),
    pickle.dumps([1 << 100, "ü", (None, True)], 2),
    pickle.dumps({"k": 1.5}, 0),
]
TENSORS = [
    framed(torch.arange(12.0).reshape(3, 4)),
    framed(torch.zeros(0, 3)),
    saved(torch.ones(5)),
    saved(torch.eye(3).to_sparse()),
]
METADATA = metadata_seeds()

TARGETS = {
    "metadata": Target(read_metadata, METADATA, 1.6),
    "index": Target(read_index, [index_seed()], 1.2),
    "byte items": Target(read_item, ITEMS, 1.2),
    "tensor items": Target(read_tensor, TENSORS),
    "records": Target(read_record, [RECORD.to_json(), CommitRecord().to_json()]),
    "catalogue keys": Target(read_catalogue, [key.encode() for key in KEYS]),
    "notes": Target(read_note, NOTES, 0.5),
    "policies": Target(read_policy, policy_seeds()),
    "urls": Target(read_url, [url.encode() for url in URLS]),
    "references": Target(read_ref, [data[:700] for data in METADATA], 0.5),
    "paths": Target(read_path, [path.encode() for path in PATHS], 0.5),
}
SHARES = sum(target.share for target in TARGETS.values())


def test_every_seed_is_read_as_it_is() -> None:
    for name, target in TARGETS.items():
        if name in ("urls", "catalogue keys", "paths"):
            continue
        for seed in target.seeds:
            target.read(seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_does_more_than_raise_an_error_of_ours(name: str, bucketpoint_tally: Tally) -> None:
    target, tried = TARGETS[name], 0
    inputs = max(int(INPUTS * target.share / SHARES), 20)

    @settings(max_examples=inputs, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @given(mutated(target.seeds))
    def fuzz(data: bytes) -> None:
        nonlocal tried
        tried += 1
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(BucketpointError):
            target.read(data)
        grown = tracemalloc.get_traced_memory()[1] - before
        assert grown <= TRACED_BYTES + TRACED_FACTOR * len(data), f"{grown} bytes for {len(data)}"

    gc.collect()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        fuzz()
    finally:
        tracemalloc.stop()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) << 10 <= RESIDENT_BYTES
    bucketpoint_tally.made(f"damaged inputs tried: {name}", tried)
    print(f"{name}: {tried} inputs")


# What was found once


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"expires": ' + b"9" * 4000 + b"}", b'{"expires": "soon"}', b'{"holder": 5}'], ids=len
)
def test_a_note_that_is_none_is_nobodys(data: bytes) -> None:
    """JSON that is too deep is a RecursionError, and a number that is too large for a float an OverflowError."""
    read_note(data)
    assert lock._holder(data) is None
    assert tombstones.state_of(data) == tombstones.BEGUN


def test_a_template_with_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidURLError):
        StepTemplate("\udcf3step-{step}")


@pytest.mark.parametrize("data", [b"R", b"0.", b"\x80\x02K\x05Q."], ids=repr)
def test_pickles_at_which_torchs_own_unpickler_stumbles_are_no_tensors(data: bytes) -> None:
    with pytest.raises(BucketpointError):
        decode_item(memoryview(bytearray(data)), whole(data), None, key="k")


@given(st.text(max_size=40), st.text(max_size=20).filter(lambda text: not text.startswith("/")))
def test_a_path_of_any_text_stays_below_the_prefix(relative: str, prefix: str) -> None:
    prefix = prefix.strip("/").replace("..", "")
    try:
        key = keys.join(prefix, relative)
    except BucketpointError:
        return
    assert key == (f"{prefix}/{relative}" if prefix else relative)
    assert ".." not in relative.split("/")
    assert not relative.startswith("/")


@given(st.text(max_size=60))
def test_a_path_of_any_text_stays_below_a_folder(tmp_path_factory: pytest.TempPathFactory, relative: str) -> None:
    root = Path("/tmp/some/root")
    try:
        key = keys.join("run", relative)
    except BucketpointError:
        return
    assert root / "run" in [*(root / key).parents, root / key] or relative in (".", "./")
