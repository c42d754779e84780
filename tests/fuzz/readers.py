"""Readers of bytes that anybody may have written, with valid inputs for each."""

from __future__ import annotations

import io
import math
import pickle
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from bucketpoint.catalog.deletion import lock, state
from bucketpoint.dcp.loading.decode import decode_item, load_bytes
from bucketpoint.format import item_info, keys
from bucketpoint.format.catalog_keys import AttemptKey, CommitKey, NoteKey, StepTemplate, UploadKey, content_of, decode
from bucketpoint.format.index.ref import find_ref
from bucketpoint.format.index.view import decode_index
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.metadata.codec import decode_metadata
from bucketpoint.format.metadata.facts import extra, record_of
from bucketpoint.format.pickles.items import MAGIC
from bucketpoint.format.record import CommitRecord
from bucketpoint.format.torch_zip import probe_frame, tensor_frame
from bucketpoint.retention import from_yaml
from bucketpoint.stores import open_store, parse_url
from fuzz.mutations import MOST_BYTES
from fuzz.seeds import POLICIES, SPARSE, VALUES, index_seed, metadata_seeds
from kit.checkpoints import saved
from security.corpus import crashes, expanding_archives


def whole(data: bytes) -> ItemInfo:
    return ItemInfo("x", 0, len(data), None)


def framed(tensor: torch.Tensor) -> bytes:
    frame = tensor_frame(tensor.dtype, tensor.shape)
    payload = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return frame.header + payload + frame.trailer


def read_metadata(data: bytes) -> None:
    metadata = decode_metadata(data)
    extra(metadata)
    for info in (metadata.storage_data or {}).values():
        keys.join("prefix", item_info.read_item(info).path)
    record_of(metadata, data, metadata_etag=None).to_json()


def read_index(data: bytes) -> None:
    metadata = decode_index(data)
    extra(metadata)
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(name, str)
        assert entry is not None
    for info in (metadata.storage_data or {}).values():
        keys.join("prefix", item_info.read_item(info).path)


def read_item(data: bytes) -> None:
    told = load_bytes(memoryview(data), whole(data), None, key="k", trusted=False, planner=DefaultLoadPlanner())
    if told[: len(MAGIC)] == MAGIC:
        # As the planner does: what it is given is sound, whatever was read.
        torch.load(io.BytesIO(told), map_location="cpu", weights_only=False)
    else:
        pickle.loads(told)


def read_tensor(data: bytes) -> None:
    probe_frame(data)
    tensor = decode_item(memoryview(bytearray(data)), whole(data), None, key="k")
    if tensor.layout is not torch.strided and math.prod(tensor.shape) < MOST_ELEMENTS:
        tensor.to_dense()


def read_record(data: bytes) -> None:
    record = CommitRecord.from_json(data)
    assert CommitRecord.from_json(record.to_json()) == record


def read_catalog(data: bytes) -> None:
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
    assert isinstance(state.state_of(data), str)


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
MOST_ELEMENTS = 100_000
HOSTILE = [*crashes().values(), *expanding_archives().values()]
ITEMS = [
    *(data for data in HOSTILE if len(data) <= MOST_BYTES),
    *map(saved, VALUES),
    saved({"step": 5, "rng": torch.get_rng_state(), "x": [1, (2, "y"), {3.5}]}),
    pickle.dumps({"a": [1, b"x", bytearray(b"y")], "d": range(5)}),
    pickle.dumps([1 << 100, "ü", (None, True)], 2),
]
TENSORS = [
    *(saved(value) for value in SPARSE),
    *expanding_archives().values(),
    framed(torch.arange(12.0).reshape(3, 4)),
    framed(torch.zeros(0, 3)),
    saved(torch.ones(5)),
    saved(torch.eye(3).to_sparse()),
]
METADATA = [*metadata_seeds(), *(data for data in crashes().values() if len(data) <= MOST_BYTES)]

TARGETS = {
    "metadata": Target(read_metadata, METADATA, 1.6),
    "index": Target(read_index, [index_seed()], 1.2),
    "byte items": Target(read_item, ITEMS, 1.2),
    "tensor items": Target(read_tensor, TENSORS),
    "records": Target(read_record, [RECORD.to_json(), CommitRecord().to_json()]),
    "catalog keys": Target(read_catalog, [key.encode() for key in KEYS]),
    "notes": Target(read_note, NOTES, 0.5),
    "policies": Target(read_policy, [text.encode() for text in POLICIES]),
    "urls": Target(read_url, [url.encode() for url in URLS]),
    "references": Target(read_ref, [data[:700] for data in metadata_seeds()], 0.5),
    "paths": Target(read_path, [path.encode() for path in PATHS], 0.5),
}
