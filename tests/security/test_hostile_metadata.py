"""Well-formed metadata that somebody wrote to do harm: paths that lead elsewhere, and sizes that nothing has."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

import bucketpoint as bp
from bucketpoint.catalog.catalog import open_catalog
from bucketpoint.catalog.deletion.state import inspect
from bucketpoint.catalog.records import read_record
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.copy import copy_checkpoint, plan_copy
from bucketpoint.errors import BucketpointError, MetadataError
from bucketpoint.format import keys
from bucketpoint.format.item_info import read_item
from bucketpoint.format.metadata.codec import decode_metadata, encode_metadata
from bucketpoint.format.record import MAX_RECORD_BYTES
from bucketpoint.retention import Keep, Prune, RetentionPolicy
from bucketpoint.stores import open_store
from kit.checkpoints import load, save
from kit.failures import failure_of

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
    saved = open_checkpoint(url)
    failure_of(lambda: copy_checkpoint(plan_copy(saved, f"{root}/copy")))
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
