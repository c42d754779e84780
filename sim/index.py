"""What an index costs for each chunk, beside the pickle that it stands for: bytes, CPU time and memory to read it.

    python sim/index.py                       8, 128 and 1,024 ranks: up to 0.9 million chunks, minutes, 4 GB
    python sim/index.py --ranks 8,128         some seconds

The state is Llama 3 8B with Adam, saved by FSDP along dimension 0. "Irregular" cuts each tensor at random rows.
CPU time is that of one thread; memory is what the process keeps, and the most while it reads. Every measurement has a
process of its own. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import multiprocessing
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list  # noqa: E402

from bucketpoint.dcp.planning.local_chunks import WantedChunks, read_items  # noqa: E402
from bucketpoint.format import keys  # noqa: E402
from bucketpoint.format.index.encode import HEAD, encode_index  # noqa: E402
from bucketpoint.format.index.view import decode_index  # noqa: E402
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata, extension  # noqa: E402
from bucketpoint.format.storage_info import make_storage_info, plan_blocks  # noqa: E402
from bucketpoint.format.torch_zip import Frame, tensor_frame  # noqa: E402

TOKEN = "0123456789ab"
HIDDEN, FEED_FORWARD, HEADS, VOCABULARY, LAYERS = 4096, 14336, 1024, 128256, 32
SEED = 20261121
KINDS = ("stock", "pickle", "index")


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of Llama 3 8B."""
    yield "tok_embeddings.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        for part, shape in (
            ("attention.wq", (HIDDEN, HIDDEN)),
            ("attention.wk", (HEADS, HIDDEN)),
            ("attention.wv", (HEADS, HIDDEN)),
            ("attention.wo", (HIDDEN, HIDDEN)),
            ("feed_forward.w1", (FEED_FORWARD, HIDDEN)),
            ("feed_forward.w2", (HIDDEN, FEED_FORWARD)),
            ("feed_forward.w3", (FEED_FORWARD, HIDDEN)),
            ("attention_norm", (HIDDEN,)),
            ("ffn_norm", (HIDDEN,)),
        ):
            yield f"layers.{layer}.{part}.weight", shape
    yield "norm.weight", (HIDDEN,)
    yield "output.weight", (VOCABULARY, HIDDEN)


def metadata_of(ranks: int, *, irregular: bool) -> tuple[Metadata, dict[str, Any]]:
    """The metadata of a save, and bucketpoint's part of it."""
    drawn = random.Random(SEED)
    entries: dict[str, Any] = {}
    for name, shape in shapes():
        for key, dtype in ((f"model.{name}", torch.bfloat16), (f"optim.state.{name}.exp_avg", torch.float32),
                           (f"optim.state.{name}.exp_avg_sq", torch.float32)):  # fmt: skip
            step = -(-shape[0] // ranks)
            cuts = list(range(0, shape[0], step))
            if irregular:
                cuts = [0, *sorted(drawn.sample(range(1, shape[0]), ranks - 1))]
            chunks = [
                ChunkStorageMetadata(
                    torch.Size((start, *(0 for _ in shape[1:]))), torch.Size((stop - start, *shape[1:]))
                )
                for start, stop in zip(cuts, [*cuts[1:], shape[0]], strict=True)
            ]
            entries[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
        entries[f"optim.state.{name}.step"] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size(()), [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
        )
    entries["step"] = BytesStorageMetadata()
    frame = functools.cache(lambda dtype, shape: tensor_frame(dtype, shape))
    items: dict[Any, Any] = {}
    ends: dict[str, int] = {}
    placed: list[tuple[MetadataIndex, str, int, Frame, int]] = []
    for rank in range(ranks):
        for key, entry in entries.items():
            group = key.partition(".")[0] if "." in key else "other"
            path = keys.data_path(TOKEN, rank, group, 0)
            at = ends.get(path, 0)
            if isinstance(entry, BytesStorageMetadata):
                if rank == 0:
                    items[MetadataIndex(key)] = make_storage_info(path, at, 457, crc32c=drawn.getrandbits(32))
                    ends[path] = at + 457
                continue
            if rank >= len(entry.chunks):
                continue
            chunk = entry.chunks[rank]
            whole = frame(entry.properties.dtype, tuple(chunk.sizes))
            nbytes = whole.payload_nbytes
            index = MetadataIndex(key, chunk.offsets, rank)
            ends[path] = at + whole.nbytes
            block = plan_blocks(nbytes, nbytes // chunk.sizes[0] if chunk.sizes else nbytes)
            placed.append((index, path, at, whole, block))
    for index, path, at, whole, block in placed:
        nbytes, table = whole.payload_nbytes, None
        if nbytes > block:
            table = ends[path]
            ends[path] += 4 * -(-nbytes // block)
        items[index] = make_storage_info(
            path, at, whole.nbytes, payload_offset=whole.payload_offset, payload_nbytes=nbytes,
            crc32c=drawn.getrandbits(32), block_nbytes=block, table_offset=table,
        )  # fmt: skip
    objects = {path: {"size": size, "etag": f"{drawn.getrandbits(128):032x}-9"} for path, size in ends.items()}
    mapping = {key: tuple(key.split(".")) for key in entries}
    facts = {"token": TOKEN, "world_size": ranks, "created": 1.8e9, "torch": str(torch.__version__), "objects": objects}
    return Metadata(entries, mapping, items, StorageMeta("s3://bucket/run/step-500", TOKEN), "1.0.0"), facts


def _write(folder: Path, ranks: int, irregular: bool) -> dict[str, Any]:
    """Encode the metadata in each way."""
    metadata, facts = metadata_of(ranks, irregular=irregular)
    bucketpoint = extension(facts)["bucketpoint"]
    (encoded, index_s), (pickled, pickle_s) = (
        _timed(lambda: encode_index(metadata, bucketpoint=bucketpoint)),
        _timed(lambda: encode_metadata(metadata, bucketpoint=facts)),
    )
    assert encoded is not None
    (folder / "index").write_bytes(encoded)
    (folder / "pickle").write_bytes(pickled)
    for info in metadata.storage_data.values():
        for name in [name for name in vars(info) if name.startswith("bp_")]:
            delattr(info, name)
    (folder / "stock").write_bytes(pickle.dumps(metadata))
    items = HEAD.unpack_from(encoded)[1]
    return {"items": items, "index_s": index_s, "pickle_s": pickle_s}


def _read(folder: Path, kind: str, ranks: int) -> dict[str, Any]:
    """Read it, and plan what one rank reads that loads as it saved."""
    decode: dict[str, Callable[[bytes], Any]] = {
        "stock": pickle.loads,
        "pickle": decode_metadata,
        "index": decode_index,
    }
    # What is imported and made once is not to be counted.
    decode[kind]((folder / f"warm-{kind}").read_bytes())
    before = _resident("VmRSS")
    data = (folder / kind).read_bytes()
    nbytes = len(data)
    metadata, read_s = _timed(decode[kind], data)
    del data
    most, kept = _resident("VmHWM") - before, _resident("VmRSS") - before
    tensors = {
        fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    local = {fqn: _local(tuple(entry.size), ranks) for fqn, entry in tensors.items()}
    plan = _by_index if kind == "index" else _by_dcp
    planned, plan_s = _timed(plan, metadata, local)
    return {"bytes": nbytes, "read_s": read_s, "memory": kept, "peak": most, "plan_s": plan_s, "planned": planned}


def _local(shape: tuple[int, ...], ranks: int) -> ChunkStorageMetadata:
    """The second rank's part."""
    if not shape:
        return ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    step = -(-shape[0] // ranks)
    return ChunkStorageMetadata(torch.Size((step, *(0 for _ in shape[1:]))), torch.Size((step, *shape[1:])))


def _by_dcp(metadata: Metadata, local: dict[str, ChunkStorageMetadata]) -> int:
    entries: Any = metadata.state_dict_metadata
    return sum(len(create_read_items_for_chunk_list(fqn, entries[fqn], [chunk])) for fqn, chunk in local.items())


def _by_index(metadata: Metadata, local: dict[str, ChunkStorageMetadata]) -> int:
    entries: Any = metadata.state_dict_metadata
    found = read_items([WantedChunks(fqn, entries[fqn].chunks, [chunk]) for fqn, chunk in local.items()])
    return sum(map(len, found.values()))


def _timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    began = time.process_time()
    return work(*arguments), time.process_time() - began


def _resident(which: str) -> int:
    """Bytes of memory: what is in use now, or the most since this was last asked for what is in use."""
    if which == "VmRSS":
        # What was freed and is kept by the allocator for later is nobody's.
        ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    if which == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(which))


def _alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call it in a process of its own."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        send.send(function(*arguments))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    send.close()
    try:
        found: dict[str, Any] = receive.recv()
    finally:
        child.join()
    return found


def measure(ranks: int, *, irregular: bool) -> dict[str, Any]:
    """All figures of one layout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _alone(_write, folder, 2, irregular)
        for kind in KINDS:
            (folder / kind).rename(folder / f"warm-{kind}")
        found = _alone(_write, folder, ranks, irregular)
        return {**found, **{kind: _alone(_read, folder, kind, ranks) for kind in KINDS}}


def lines(ranks: int, irregular: bool, found: dict[str, Any]) -> Iterator[str]:
    """Rows of the table in `docs/scale.md`."""
    items, planned = found["items"], {found[kind]["planned"] for kind in KINDS}
    if len(planned) != 1:
        raise SystemExit(f"the plans differ: {planned}")
    layout = "irregular" if irregular else "regular"
    for kind, title in (("stock", "DCP's pickle"), ("pickle", "`.metadata`"), ("index", "index")):
        row = found[kind]
        checksums = 0 if kind == "stock" else 4 * items
        # In a pickle a checksum takes more than its four bytes: its name, and an opcode or two.
        bare = "" if kind == "pickle" else f"{(row['bytes'] - checksums) / items:.1f}"
        whole = "" if kind == "stock" else f"{row['bytes'] / items:.1f}"
        made = {"stock": "", "pickle": f"{found['pickle_s'] / items * 1e6:.1f}", "index": f"{found['index_s'] / items * 1e6:.1f}"}  # fmt: skip # noqa: E501
        yield (
            f"| {layout}, {ranks:,} ranks | {items:,} | {title} | {bare} | {whole} "
            f"| {made[kind]} | {row['read_s'] / items * 1e6:.2f} "
            f"| {row['plan_s'] / items * 1e6:.2f} | {row['memory'] / items:,.0f} | {row['peak'] / items:,.0f} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[8, 128, 1024])
    parser.add_argument("--json", type=Path, help="write the raw figures there")
    options = parser.parse_args(arguments)
    raw = []
    for ranks in options.ranks:
        for irregular in (False, True):
            found = measure(ranks, irregular=irregular)
            raw.append({"ranks": ranks, "irregular": irregular, **found})
            for line in lines(ranks, irregular, found):
                print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
