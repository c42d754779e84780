"""Valid inputs of each kind, small, so that a change is likely to hit something that matters."""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
import types
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from bucketpoint.format.index.encode import encode_index
from bucketpoint.format.index.ref import make_ref
from bucketpoint.format.metadata.codec import encode_metadata, extension
from bucketpoint.format.pickles.metadata_vocabulary import trailer
from bucketpoint.format.storage_info import make_storage_info
from kit.metadata import tensor_entry

TOKEN = "0123456789ab"
PATH = f"data/5e/{TOKEN}-0-model-0.distcp"


def metadata() -> tuple[Metadata, dict[str, object]]:
    entry = tensor_entry([4, 6], [([row, 0], [2, 6]) for row in (0, 2)])
    names = {"model.w": entry, "step": BytesStorageMetadata()}
    storage = {
        MetadataIndex("model.w", chunk.offsets, number): make_storage_info(
            PATH, 500 * number, 400, payload_offset=128, payload_nbytes=48, crc32c=7, block_nbytes=48
        )
        for number, chunk in enumerate(entry.chunks)
    }
    storage[MetadataIndex("step")] = make_storage_info(PATH, 1000, 300, crc32c=9)
    mappings = {"model.w": ("model", "w"), "step": ("step",)}
    made = Metadata(names, mappings, storage, StorageMeta("s3://b/run", TOKEN))
    facts: dict[str, object] = {
        "token": TOKEN,
        "url": "s3://b/run",
        "endpoint": "s3://b",
        "created": 1.5,
        "world_size": 2,
        "torch": "2.15.0",
        "objects": {PATH: {"size": 1300, "etag": "abc"}},
    }
    return made, facts


def index_seed() -> bytes:
    made, facts = metadata()
    found = encode_index(made, bucketpoint=extension(facts)["bucketpoint"])
    assert found is not None
    return found


def metadata_seeds() -> list[bytes]:
    made, facts = metadata()
    encoded = (encode_metadata(made, bucketpoint=facts, index=index) for index in (None, make_ref(TOKEN, b"index")))
    return [
        # The checksum in the trailer would refuse every mutation before the pickle is read.
        *(data[: -len(trailer(0))] for data in encoded),
        *(pickle.dumps(made, protocol) for protocol in (2, 4, 5)),
    ]


POLICIES = [
    """version: 1
root: ${RUN}/x
keep:
  latest: 3
  best:
    - {metric: eval/loss, mode: min, count: 2, await: {for: 2h, max: 3}}
  every:
    - {steps: 1000, until: 50000, last: 5}
    - {hours: 24, last: 14, thin: weights}
  within: 6h
  steps: [1, 2, 3]
prune: {grace: 1h, max_delete: {count: 20, fraction: 0.5}}
""",
    "version: 1\nkeep: {latest: 1}\n",
    "version: 1\nkeep: {latest: 1}\nprune: {grace: 20m, when: manual}\n",
    "version: 1\nkeep:\n  latest: 2\n  match: my_pkg.policies:keep\n",
]


VALUES: list[Any] = [
    [np.ones((2, 3)), np.float32(1), np.array(["a", None], object), np.datetime64("2026-01-02"), np.arange(3)],
    torch.Generator(),
    {
        "values": [pathlib.PurePosixPath("z"), 1j],
        "times": [datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(4)],
        "containers": [collections.OrderedDict(a=1), collections.Counter("abca"), collections.deque([1], 3)],
        "keys": {(1, ("a", 2)): {3, 4}, frozenset([5]): 6},
        "stream": io.BytesIO(b"abc"),
        "space": types.SimpleNamespace(a=1),
    },
    [torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()],
    {"meta": torch.ones(2, device="meta"), "view": torch.ones(6)[1:3].expand(4, 2), "size": torch.Size((1, 2))},
]
SPARSE: list[torch.Tensor] = [
    torch.eye(3).to_sparse(),
    torch.eye(3).to_sparse_csr(),
    torch.eye(4).to_sparse_bsr((2, 2)),
]
