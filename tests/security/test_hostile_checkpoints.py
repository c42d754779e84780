"""Checkpoints that somebody wrote to do harm, and what must still load.

A few kilobytes that ended the reader, held it for ever, or took gigabytes; paths that lead elsewhere; and sizes that
nothing has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

import bucketpoint as bp
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.state import inspect
from bucketpoint.catalog.records import read_record
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.copy import copy_checkpoint, plan_copy
from bucketpoint.dcp.loading.decode import fill_tensor
from bucketpoint.errors import BucketpointError, MetadataError, UnsafeDataError
from bucketpoint.format import keys
from bucketpoint.format.item_info import read_item
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata
from bucketpoint.format.record import MAX_RECORD_BYTES
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores import open_store
from kit.checkpoints import load, save, saved
from kit.failures import failure_of
from kit.programs import run_program
from security.corpus import archive, crashes, expanding_archives

PROGRAM = """
import json, resource, sys
from pathlib import Path
import torch.distributed.checkpoint as dcp
import bucketpoint as bp
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.errors import BucketpointError
from security.test_hostile_checkpoints import theirs

def outcome(action):
    try:
        action()
    except dcp.CheckpointException as failed:
        return type(next(iter(failed.failures.values()))[0]).__name__
    except BucketpointError as error:
        return type(error).__name__
    except Exception as error:
        return f"RAISED {type(error).__name__}: {error}"[:200]
    return "read"

found, folder = {}, Path(sys.argv[2])
for number, (name, path) in enumerate(json.loads(sys.argv[1]).items()):
    data, root = Path(path).read_bytes(), folder / str(number)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.argv[3] == "item":
        theirs(root, {"x": 5}, data)
        reader = bp.BucketReader(f"file://{root}")
        said = [outcome(lambda: dcp.load({"x": 0}, storage_reader=reader, no_dist=True))]
    else:
        theirs(root, {"x": 5}, None)
        (root / ".metadata").write_bytes(data)
        url = f"file://{root}"
        said = [
            outcome(lambda: open_checkpoint(url)),
            outcome(lambda: verify(open_checkpoint(url))),
            outcome(lambda: bp.load({"x": 0}, url, deadline_s=4)),
        ]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found[name] = [*said, (grown << 10) > (24 << 20) + 8 * len(data)]
print(json.dumps(found))
"""


def theirs(root: Path, state: dict[str, Any], item: bytes | None) -> None:
    """A checkpoint of torch's own writer, which keeps no checksums, with other bytes in its only item."""
    dcp.save(state, storage_writer=FileSystemWriter(root), no_dist=True)
    if item is None:
        return
    (path,) = root.glob("*.distcp")
    path.write_bytes(item)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = len(item)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))


def outcomes(samples: dict[str, bytes], folder: Path, kind: str) -> dict[str, list[Any]]:
    """Outcomes of each sample, and whether too much memory was taken, in a process that it may end."""
    paths = {}
    for number, (name, data) in enumerate(samples.items()):
        paths[name] = str(folder / f"{number}.data")
        Path(paths[name]).write_bytes(data)
    done = run_program(PROGRAM, json.dumps(paths), str(folder), kind)
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def out_of_bounds() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1 << 40]]), torch.ones(1), (4,), check_invariants=False)


def test_reads_items_of_allowed_names_without_a_crash_or_a_hang(tmp_path: Path) -> None:
    crashing = {name: archive(body) for name, body in crashes().items()}
    found = outcomes({**crashing, **expanding_archives()}, tmp_path, "item")
    assert len(found) >= 17
    assert {name: told for name, told in found.items() if told != ["UnsafeDataError", False]} == {}


def test_reads_metadata_without_a_crash_or_a_hang(tmp_path: Path) -> None:
    found = outcomes(crashes(), tmp_path, "metadata")
    unsafe = {"UnsafeDataError", "MetadataError"}
    assert {name: told for name, told in found.items() if told[-1] or not unsafe.issuperset(told[:-1])} == {}


def test_loads_a_stream_of_bytes_as_it_was_saved(tmp_path: Path) -> None:
    stream = io.BytesIO(b"abcdef")
    stream.seek(3)
    dcp.save({"x": stream}, checkpoint_id=f"file://{tmp_path}/x", storage_writer=bp.BucketWriter(), no_dist=True)
    state: dict[str, Any] = {"x": io.BytesIO()}
    dcp.load(state, checkpoint_id=f"file://{tmp_path}/x", storage_reader=bp.BucketReader(), no_dist=True)
    assert (state["x"].getvalue(), state["x"].tell()) == (b"abcdef", 3)


def test_reads_metadata_of_torch_before_2_2(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    data = pickle.dumps(metadata, 2)
    new, old = b"torch.distributed.checkpoint.metadata\n", b"torch.distributed._shard.sharded_tensor.metadata\n"
    for name in (b"TensorProperties", b"_MEM_FORMAT_ENCODING"):
        assert new + name in data
        data = data.replace(new + name, old + name.lstrip(b"_"))
    (tmp_path / ".metadata").write_bytes(data)
    state = {"w": torch.zeros(4)}
    dcp.load(state, storage_reader=bp.BucketReader(f"file://{tmp_path}"), no_dist=True)
    assert state["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["item of bytes", "tensor item"])
def test_refuses_indices_of_a_sparse_tensor_that_lie_outside_of_it(where: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": 0}
    if where == "tensor item":
        theirs(tmp_path, {"w": torch.ones(4)}, saved(out_of_bounds()))
        state = {"w": torch.zeros(4).to_sparse()}
    else:
        theirs(tmp_path, {"w": 5}, saved((out_of_bounds(),)))
    reader = bp.BucketReader(f"file://{tmp_path}")
    error = failure_of(lambda: dcp.load(state, storage_reader=reader, no_dist=True))
    assert isinstance(error, UnsafeDataError)
    assert "indices" in error.message


@pytest.mark.parametrize("target", ["sparse, with other elements", "sparse, empty", "dense"])
def test_loads_a_sparse_tensor_as_it_was_saved(target: str, tmp_path: Path) -> None:
    eye = torch.eye(4).to_sparse()
    dcp.save({"w": eye}, checkpoint_id=f"file://{tmp_path}/x", storage_writer=bp.BucketWriter(), no_dist=True)
    into = torch.zeros(4, 4)
    if target != "dense":
        into[1, 2] = float(target != "sparse, empty")
        into = into.to_sparse()
    state = {"w": into}
    dcp.load(state, checkpoint_id=f"file://{tmp_path}/x", storage_reader=bp.BucketReader(), no_dist=True)
    assert state["w"] is into
    assert torch.equal(into.to_dense(), torch.eye(4))
    assert into.layout is torch.strided or torch.equal(into.coalesce().indices(), eye.indices())


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_loads_compressed_sparse_tensors_over_other_elements_than_they_had(layout: torch.layout) -> None:
    """torch 2.15 refuses to save them; older ones save them, and then they are loaded."""
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    target = torch.zeros(4, 4)
    target[0, 1] = 3
    target = target.to_sparse(layout=layout, blocksize=block)
    fill_tensor(target, torch.eye(4).to_sparse(layout=layout, blocksize=block))
    assert torch.equal(target.to_dense(), torch.eye(4))


GROWTH_BYTES = 64 << 20
ELSEWHERE = ["../secret", "a/../../secret", "./../secret", "/etc/passwd", "s3://other/secret"]


def tampered(url: str, change: Callable[[Any], Any]) -> None:
    """Rewrite where each item lies."""
    store, prefix = open_store(url)
    key = f"{prefix}/{keys.METADATA}".lstrip("/")
    metadata: Metadata = decode_metadata(store.get(key)[0])
    metadata.storage_data = {index: change(info) for index, info in (metadata.storage_data or {}).items()}
    store.put(key, [memoryview(encode_metadata(metadata, bucketpoint={}))])


@pytest.mark.parametrize("path", ELSEWHERE)
def test_refuses_every_path_that_leads_out_of_the_checkpoint(path: str, tmp_path: Path) -> None:
    """A load, a verification and a copy refuse it; an overwrite leaves alone what it names."""
    root, url = f"file://{tmp_path}", f"file://{tmp_path}/run/step-1"
    save(url, 1)
    (path_here,) = {info.path for _, info in open_checkpoint(url).items if "-model-" in info.path}
    secret = (tmp_path / "run" / "step-1" / path_here).read_bytes()
    for place in ("secret", "run/secret"):
        (tmp_path / place).write_bytes(secret)
    tampered(url, lambda info: dataclasses.replace(info, relative_path=path))
    assert failure_of(lambda: load(url)).message.startswith("The metadata names an object path")
    failure_of(lambda: verify(open_checkpoint(url)))
    checkpoint = open_checkpoint(url)
    failure_of(lambda: copy_checkpoint(plan_copy(checkpoint, f"{root}/copy")))
    save(url, 2)
    assert load(url) == 2
    assert (tmp_path / "secret").read_bytes() == (tmp_path / "run" / "secret").read_bytes() == secret


@pytest.mark.parametrize("path", [".metadata", "./.metadata", ".bucketpoint.json", "inner/.metadata"])
def test_deletes_no_commit_in_an_overwrite_that_old_metadata_calls_data(path: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    save(f"{url}/inner", 3)
    save(url, 1)
    tampered(url, lambda info: dataclasses.replace(info, relative_path=path))
    save(url, 2)
    assert (load(url), load(f"{url}/inner")) == (2, 3)
    assert (tmp_path / "run" / ".bucketpoint.json").exists()


@pytest.mark.parametrize("nbytes", [1 << 33, 1 << 45, (1 << 63) - 1, 1 << 70, -1], ids=hex)
@pytest.mark.parametrize("field", ["length", "offset"])
def test_refuses_sizes_that_no_object_has_before_they_are_allocated(field: str, nbytes: int, tmp_path: Path) -> None:
    """Of the items that are taken whole: those of bytes, and those of other writers."""
    url = f"file://{tmp_path}/run"
    save(url, 1)

    def change(info: Any) -> Any:
        known = read_item(info)
        sizes = {"offset": known.offset, "length": known.length, field: nbytes}
        return _StorageInfo(known.path, sizes["offset"], sizes["length"])

    tampered(url, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failure_of(lambda: load(url))
    with contextlib.suppress(BucketpointError):
        assert verify(open_checkpoint(url)).damage
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 <= GROWTH_BYTES


def test_refuses_to_read_a_record_larger_than_any(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    policy = RetentionPolicy(Keep(latest=3), prune=Prune(when="manual"))
    with bp.CheckpointManager(url, policy=policy) as manager:
        manager.save(1, {"model": {"w": torch.ones(3)}})
    catalog = open_catalog(url)
    (one,) = catalog.snapshot().checkpoints
    assert one.key is not None
    with (tmp_path / "run" / one.key).open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)
    with pytest.raises(MetadataError):
        read_record(catalog, one.key)
    assert "cannot be read" in str(inspect(catalog, catalog.snapshot().checkpoints[-1]).problem)
