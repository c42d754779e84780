"""The reader of docs/format.md, which has neither torch nor bucketpoint, against what bucketpoint and torch write."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from awscrt import checksums
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter

import bucketpoint
from bucketpoint import BucketWriter, SavePlanner
from bucketpoint.errors import NewerFormatError
from bucketpoint.format.index.int_columns import Decoder, Segments, encode, encode_segments, narrow
from bucketpoint.format.index.ref import find_ref
from bucketpoint.format.item_info import read_item
from bucketpoint.format.metadata import facts
from bucketpoint.format.metadata.codec import decode_metadata, pickled
from bucketpoint.format.metadata.plain import read_metadata
from bucketpoint.format.record import CommitRecord
from dcp import reshard_job as job
from dcp.planning.test_reshard import Case, jobs, memory_of, values
from dcp.ranks import Ranks
from dcp.states import filled
from golden.describe import described
from golden.states import flat, plain_state, save_sharded
from services import Service

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALONE = EXAMPLES.parent / "tests" / "golden" / "alone.py"

sys.path.append(str(EXAMPLES))
import independent_reader  # noqa: E402
from independent_formats import column, segmented  # noqa: E402


def alone(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the reader in a process that can import neither torch nor bucketpoint."""
    command = [sys.executable, str(ALONE), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, **(env or {})}
    )


def read_alone(url: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = alone(url, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def read_here(url: str | Path, *metadata: str) -> dict[str, Any]:
    """The same in this process, which is faster."""
    return {
        name: described(value if dtype is None else (dtype, value))
        for name, (dtype, value) in independent_reader.load(str(url), *metadata).items()
    }


def save(state: dict[str, Any], path: Path, **arguments: Any) -> None:
    writer = BucketWriter(str(path), **arguments)
    dcp.save(state, storage_writer=writer, planner=SavePlanner(), no_dist=True)


def replaced(path: Path, change: Any) -> None:
    """Change the bytes of a file."""
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)


def flip(at: int, data: bytearray) -> None:
    data[at] ^= 1


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Ranks of these tests alone: they write small tables and indexes from the first save on."""
    with Ranks(4) as four:
        yield four


def test_needs_neither_torch_nor_bucketpoint() -> None:
    for module in ("torch.distributed", "bucketpoint"):
        done = alone("--import", module)
        assert done.returncode != 0
        assert "is blocked" in done.stderr
    assert alone("--import", "numpy").returncode == 0


@pytest.mark.parametrize("service", ["moto", "minio"], indirect=True)
@pytest.mark.parametrize("indexed", [False, True], ids=["metadata", "index"])
def test_loads_what_four_ranks_saved_to_s3(service: Service, ranks: Ranks, indexed: bool) -> None:
    url = service.url("run/step-1")
    told = ranks.run(save_sharded, url, service.options, indexed)
    expected = {name: value for mine in told for name, value in mine.items()}
    assert (find_ref(service.read("run/step-1/.metadata")[:512]) is not None) == indexed

    assert read_alone(url, service.env) == expected


def test_reads_the_index_of_a_large_checkpoint_or_does_without(tmp_path: Path) -> None:
    state = {"model": {f"layer{number}": filled((number % 5, 3), torch.float16) for number in range(770)}, "step": 3}
    save(state, tmp_path)
    expected, metadata = flat(state), tmp_path / ".metadata"
    ref = find_ref(metadata.read_bytes()[:512])
    assert ref is not None

    replaced(metadata, lambda data: data[:512])  # the index is all that is left
    assert read_here(tmp_path) == expected

    save(state, tmp_path)
    ref = find_ref(metadata.read_bytes()[:512])
    replaced(tmp_path / ref.path, partial(flip, 200))
    assert read_here(tmp_path) == expected
    (tmp_path / ref.path).unlink()
    assert read_here(tmp_path) == expected


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(
    which=jobs(),
    stock=st.integers(0, 4).map(lambda number: not number),
    indexed=st.booleans(),
    block=st.sampled_from([7, 100, 1 << 20]),
    slice_bytes=st.sampled_from([16, 200, 1 << 16]),
)
def test_loads_any_layout_of_any_tensors(
    which: tuple[list[Case], int, int], stock: bool, indexed: bool, block: int, slice_bytes: int
) -> None:
    tensors, world, _ = which
    wholes = {f"t{number}": values(case, number) for number, case in enumerate(tensors)}
    named = list(zip(wholes.items(), tensors, strict=True))
    states: list[dict[str, Any]] = []
    for rank in range(world):
        with job.as_rank(rank, world):
            states.append(
                {key: job.held(case.saved, whole, rank, partial(memory_of, case))[0] for (key, whole), case in named}
            )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("bucketpoint.dcp.saving.object_layout.plan_blocks", lambda nbytes, row: min(nbytes, block)),
        mock.patch("bucketpoint.dcp.planning.items.MIN_SLICE_BYTES", slice_bytes),
        mock.patch("bucketpoint.format.index.ref.INDEX_ITEMS", 1 if indexed else 1 << 30),
    ):
        kind = FileSystemWriter if stock else BucketWriter
        job.save(states, lambda: kind(folder), SavePlanner)
        assert (find_ref(Path(folder, ".metadata").read_bytes()[:512]) is not None) == (indexed and not stock)
        assert read_here(folder) == flat(wholes)


@given(data=st.binary(max_size=300))
def test_computes_crc32c(data: bytes) -> None:
    assert independent_reader.crc32c(data) == checksums.crc32c(data)


numbers = st.one_of(st.integers(-3, 3), st.integers(-(1 << 40), 1 << 40), st.integers(-(1 << 61), 1 << 61))
progressions = st.builds(
    lambda start, step, count, last: [*(start + step * n for n in range(count)), start + step * count + last],
    numbers, st.integers(-9, 9), st.integers(0, 9), st.integers(-9, 9),
)  # fmt: skip


@pytest.mark.contract
@given(parts=st.lists(st.one_of(progressions, st.lists(numbers, max_size=5)), max_size=6))
def test_reads_any_columns_of_an_index_by_both_readers(parts: list[list[int]]) -> None:
    every, counts = (
        torch.tensor([*itertools.chain(*parts)], dtype=torch.int64),
        torch.tensor([*map(len, parts)], dtype=torch.int64),
    )
    assert column(io.BytesIO(encode(every)), len(every)).tolist() == every.tolist()
    assert Decoder(encode(every)).column(len(every)).tolist() == every.tolist()
    assert narrow(every).tolist() == every.tolist()
    stored = io.BytesIO(encode_segments(every, Segments.of(counts)))
    assert segmented(stored, counts.numpy()).tolist() == every.tolist()
    assert not stored.read()
    decoder = Decoder(stored.getvalue())
    assert decoder.segmented(Segments.of(counts)).tolist() == every.tolist()
    decoder.end()


def test_refuses_a_flipped_byte_of_any_item(tmp_path: Path) -> None:
    save({"model": {"w": filled((8, 6), torch.bfloat16), "v": filled((3,), torch.int64)}, "step": 3}, tmp_path)
    items = [read_item(info) for info in read_metadata((tmp_path / ".metadata").read_bytes()).storage_data.values()]
    assert len(items) == 3
    for item in items:
        path, start = tmp_path / item.path, item.offset + (item.payload_offset or 0)
        for at in (start, start + item.checked_nbytes - 1):
            replaced(path, partial(flip, at))
            with pytest.raises(ValueError, match=r"is damaged: bytes \d+ to \d+ of data/"):
                independent_reader.load(str(tmp_path))
            replaced(path, partial(flip, at))
    independent_reader.load(str(tmp_path))


def lacks_a_chunk(folder: Path, path: Path) -> None:
    metadata = decode_metadata((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].size = torch.Size([9, 6])
    (folder / ".metadata").write_bytes(pickled(metadata))


def is_truncated(folder: Path, path: Path) -> None:
    start = next(iter(read_metadata((folder / ".metadata").read_bytes()).storage_data.values())).bp_po
    replaced(path, lambda data: data[: start + 8 * 6 * 2 - 1])


def leads_elsewhere(folder: Path, path: Path) -> None:
    shutil.copy(path, folder.parent / "outside")
    metadata = decode_metadata((folder / ".metadata").read_bytes())
    for info in (metadata.storage_data or {}).values():
        info.relative_path = "../outside"
    (folder / ".metadata").write_bytes(pickled(metadata))


def has_a_flipped_bit_in_the_metadata(folder: Path, path: Path) -> None:
    replaced(folder / ".metadata", partial(flip, 300))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lacks_a_chunk, r"chunks are missing of \['model.w'\]"),
        (is_truncated, r"model\.w is damaged"),
        (leads_elsewhere, "leads out of the checkpoint"),
        (has_a_flipped_bit_in_the_metadata, r"\.metadata is damaged"),
    ],
)
def test_refuses_a_checkpoint_that_is_not_whole_or_names_an_object_elsewhere(
    tmp_path: Path, damage: Any, told: str
) -> None:
    save({"model": {"w": filled((8, 6), torch.bfloat16)}}, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("data/*/*")
    damage(tmp_path / "c", path)
    with pytest.raises(ValueError, match=told):
        independent_reader.load(str(tmp_path / "c"))


def test_runs_no_pickle(tmp_path: Path) -> None:
    touched = tmp_path / "touched"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(touched),)

    save({"model": {"w": torch.ones(3)}, "value": Hostile()}, tmp_path / "c")
    dtype, error = independent_reader.load(str(tmp_path / "c"))["value"]
    assert (dtype, type(error), str(error)) == (None, pickle.UnpicklingError, "the pickle names posix.mkdir")

    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.mkdir"):
        independent_reader.load(str(tmp_path / "c"))
    assert not touched.exists()


@pytest.mark.parametrize("items", [1, 800], ids=["metadata", "index"])
def test_refuses_a_newer_format_by_both_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: int) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("bucketpoint.format.metadata.codec.FORMAT_VERSION", facts.FORMAT_VERSION + 1)
        save({"model": {f"w{number}": torch.ones(1) for number in range(items)}}, tmp_path)
    assert (find_ref((tmp_path / ".metadata").read_bytes()[:512]) is not None) == (items > 1)
    with pytest.raises(NotImplementedError, match="newer version"):
        independent_reader.load(str(tmp_path))
    with pytest.raises(NewerFormatError):
        bucketpoint.load(str(tmp_path))


def test_skips_what_later_versions_may_add_by_both_readers(tmp_path: Path) -> None:
    state = plain_state()
    save(state, tmp_path)
    path, later = tmp_path / ".metadata", {"of": ["a later", "version"]}
    metadata = decode_metadata(path.read_bytes())
    vars(metadata).update(bucketpoint_later=later)
    vars(metadata)["bucketpoint"]["later"] = later
    for info in metadata.storage_data.values():
        info.bp_later = later
    path.write_bytes(pickled(metadata))
    record = tmp_path / ".bucketpoint.json"
    record.write_text(json.dumps({"version": 1, "later": later}))

    assert read_here(tmp_path) == flat(state)
    assert flat(bucketpoint.load(str(tmp_path))) == flat(state)
    assert CommitRecord.from_json(record.read_bytes()).version == 1
