"""Metadata is thinned to the weights by its opcodes, and says the same as if it had been made of what is left."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import BytesStorageMetadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from bucketpoint.errors import BucketpointError, CheckpointDeletedError, MetadataError
from bucketpoint.format import keys
from bucketpoint.format.index.ref import IndexRef, find_ref, index_path, ref_of
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata, extension
from bucketpoint.format.metadata.facts import extra
from bucketpoint.format.metadata.plain import read_record
from bucketpoint.format.metadata.template import make_template
from bucketpoint.format.metadata.thinning import Outline
from bucketpoint.format.pickles.metadata_vocabulary import trailer
from bucketpoint.format.record import DeletionMarker
from bucketpoint.format.storage_info import make_storage_info, pack
from format.metadata.test_template import index_columns
from kit.metadata import tensor_entry

TOKEN = "0123456789ab"
INDEX = IndexRef(index_path(TOKEN), 1000, "0" * 64)


def checkpoint(form: str, tensors: int, ranks: int, seed: int = 0) -> bytes:
    """Bytes of metadata: a third of the tensors are weights, cut among ranks; and some values."""
    drawn = random.Random(seed)
    state: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    indices: list[list[MetadataIndex]] = [[] for _ in range(ranks)]
    infos: list[list[Any]] = [[] for _ in range(ranks)]

    def add(rank: int, group: str, index: MetadataIndex, nbytes: int, **about: Any) -> None:
        path = keys.data_path(TOKEN, rank, group, drawn.randrange(2))
        indices[rank].append(index)
        infos[rank].append(make_storage_info(path, sizes.get(path, 0), nbytes, crc32c=drawn.getrandbits(32), **about))
        sizes[path] = sizes.get(path, 0) + nbytes

    for number in range(tensors):
        group = ("model", "optim", "optim")[drawn.randrange(3)]
        name = f"{group}.{number}"
        if drawn.random() < 0.1:
            state[name] = BytesStorageMetadata()
            add(0, group, MetadataIndex(name), 50)
            continue
        rows = drawn.choice([1, 8, 300, 70000])
        # Shapes that occur first in what goes, and again in what stays.
        dtype = drawn.choice([torch.float32, torch.bfloat16])
        state[name] = tensor_entry([ranks * rows, 4], [([rank * rows, 0], [rows, 4]) for rank in range(ranks)], dtype)
        for rank, chunk in enumerate(state[name].chunks):
            add(
                rank, group, MetadataIndex(name, chunk.offsets, rank), rows * 16 + 100,
                payload_offset=64, payload_nbytes=rows * 16,
            )  # fmt: skip
    facts = {"token": TOKEN, "step": 7, "metrics": {"loss": 1.5}, "world_size": ranks}
    facts["objects"] = {path: {"size": size, "etag": None} for path, size in sizes.items()}
    metadata = Metadata(state, {name: (*name.split("."), "w") for name in state})
    metadata.storage_meta = StorageMeta(checkpoint_id="s3://bucket/run", save_id="a")
    if form == "objects":
        pairs = zip(itertools.chain(*indices), itertools.chain(*infos), strict=True)
        metadata.storage_data = dict(pairs)
        return encode_metadata(metadata, bucketpoint=facts, index=INDEX)
    packed = [pack(each) for each in infos]
    template = make_template(metadata, index_columns(indices), packed, indexed=True)  # type: ignore[arg-type]
    filled = template.fill(packed, {"storage_meta": metadata.storage_meta, **extension(facts)}, INDEX)  # type: ignore[arg-type]
    assert filled is not None
    return filled


def rebuilt(metadata: Metadata) -> tuple[Any, ...]:
    """Whatever metadata says of its weights."""
    stored = {index: vars(info) for index, info in metadata.storage_data.items() if "-optim-" not in info.relative_path}
    names = {index.fqn for index in stored}
    state = {name: entry for name, entry in metadata.state_dict_metadata.items() if name in names}
    mappings = {name: path for name, path in metadata.planner_data.items() if name in names}
    hints = [index.index for index in stored]
    return state, list(state), mappings, stored, list(stored), hints, metadata.storage_meta


@pytest.mark.parametrize("form", ["objects", "template"])
@pytest.mark.parametrize(("tensors", "ranks"), [(7, 1), (60, 1), (40, 3), (1500, 2)])
def test_leaves_the_weights_as_they_were(form: str, tensors: int, ranks: int) -> None:
    for seed in range(1 if tensors > 100 else 10):
        data = checkpoint(form, tensors, ranks, seed)
        before = decode_metadata(data)
        thinned = Outline(data).thinned("etag")
        after = decode_metadata(thinned)
        assert rebuilt(after) == rebuilt(before)
        assert rebuilt(pickle.loads(thinned)) == rebuilt(before)
        assert len(after.storage_data) == len(rebuilt(before)[3])
        facts, former = extra(after), extra(before)
        gone = {path for path in former["objects"] if "-optim-" in path}
        assert facts["objects"] == {path: fact for path, fact in former["objects"].items() if path not in gone}
        assert facts["thinned_paths"] == sorted(gone | {INDEX.path})
        assert (facts["kind"], facts["thinned_from"], facts["metrics"]) == ("weights", "etag", {"loss": 1.5})
        # No reader is sent to the index, which holds the optimizer.
        assert (find_ref(data), find_ref(thinned), ref_of(after)) == (INDEX, None, None)
        again = Outline(thinned)
        record = read_record(thinned, metadata_etag="new")
        assert record.covers
        assert (
            again.record(metadata_etag="new").to_json()
            == record.__class__(**{**vars(record), "covers": None}).to_json()
        )
        assert again.paths == set(facts["objects"])
        with pytest.raises(MetadataError, match="no object that holds only"):
            again.thinned()


@pytest.mark.parametrize("form", ["objects", "template"])
def test_ends_with_a_checksum_before_and_after_and_thins_no_damaged_metadata(form: str) -> None:
    data = checkpoint(form, 7, 1)
    for whole in (data, Outline(data).thinned("etag")):
        assert whole.endswith(trailer(zlib.crc32(whole[: -len(trailer(0))])))
    # A flipped bit in a metric, from which the policy and the record would be misled.
    flipped = data.replace(b"\x04loss", b"\x04lors")
    assert flipped != data
    with pytest.raises(MetadataError, match="checksum"):
        Outline(flipped)


def test_refuses_shared_objects_and_other_writers() -> None:
    mixed = decode_metadata(checkpoint("objects", 10, 2))
    moved = next(info for index, info in mixed.storage_data.items() if index.fqn.startswith("optim") and index.offset)
    moved.relative_path = keys.data_path(TOKEN, 0, "model", 0)
    with pytest.raises(MetadataError, match="share objects"):
        Outline(encode_metadata(mixed, bucketpoint=extra(mixed))).thinned()
    for protocol in (2, 4, 5):
        with pytest.raises(MetadataError):
            Outline(pickle.dumps(Metadata(mixed.state_dict_metadata, None, {}), protocol)).thinned()
    with pytest.raises(CheckpointDeletedError):
        Outline(DeletionMarker("abc", 1.0).encode())


@pytest.mark.parametrize("form", ["objects", "template"])
def test_refuses_damaged_bytes(form: str) -> None:
    """Whatever the bytes are, the answer is ours: an error of the package, or metadata."""
    data = checkpoint(form, 6, 1)
    drawn = random.Random(1)
    for cut in range(0, len(data), 41):
        with pytest.raises(BucketpointError):
            Outline(data[:cut])
    for _ in range(150):
        changed = bytearray(data)
        changed[drawn.randrange(len(data))] = drawn.randrange(256)
        with contextlib.suppress(BucketpointError):
            Outline(bytes(changed)).thinned()


@pytest.mark.parametrize("form", ["objects", "template"])
def test_takes_a_small_multiple_of_the_bytes_and_no_torch(form: str, tmp_path: Path) -> None:
    data = checkpoint(form, 60, 32)
    tracemalloc.start()
    try:
        Outline(data).thinned()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(data)
    for endless in (b"N" * 400_000, b"(" * 400_000, b"}" * 400_000):
        with pytest.raises(MetadataError, match="stack"):
            Outline(b"\x80\x04" + endless + b".")
    (tmp_path / "metadata").write_bytes(data)
    program = (
        "import sys, bucketpoint.catalog.deletion.prune\n"
        "from bucketpoint.format.metadata.thinning import Outline\n"
        "Outline(open(sys.argv[1], 'rb').read()).thinned()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "metadata")], check=True)
