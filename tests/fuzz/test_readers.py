"""Whatever the bytes: each reader raises an error of ours or returns, and takes time and memory by their length.

Readers run in child processes: a signal, a time-out and an allocation are failures like a foreign exception.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
import torch

from bucketpoint.catalog.deletion import lock, state
from bucketpoint.dcp.loading.decode import decode_item
from bucketpoint.errors import BucketpointError, InvalidURLError
from fuzz.readers import HOSTILE, TARGETS, read_item, read_note, read_url, whole
from fuzz.runs import run
from kit.checkpoints import saved
from kit.tally import Tally

INPUTS = int(os.environ.get("BUCKETPOINT_FUZZ") or 5000)
"""Of all targets together. `make fuzz` asks for 100,000."""

SEED = int(os.environ.get("BUCKETPOINT_FUZZ_SEED") or 1)


def test_reads_every_seed_as_it_is() -> None:
    """All but those that are there because they did harm."""
    for name, target in TARGETS.items():
        if name in ("urls", "catalog keys", "paths"):
            continue
        for seed in target.seeds:
            if seed not in HOSTILE:
                target.read(seed)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="processes are limited and measured on Linux")
def test_raises_an_error_of_ours_at_worst_for_any_input(bucketpoint_tally: Tally) -> None:
    shares = sum(target.share for target in TARGETS.values())
    counts = {name: max(int(INPUTS * one.share / shares), 20) for name, one in TARGETS.items()}
    failures = run(counts, seed=SEED)
    for name, tried in counts.items():
        bucketpoint_tally.made(f"damaged inputs tried: {name}", tried)
        print(f"{name}: {tried} inputs")
    assert failures == [], f"seed {SEED}: fuzz.child.input_of(target, seed, number) makes the input again"


# What was found once


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b'{"expires": ' + b"9" * 4000 + b"}", b'{"expires": "soon"}', b'{"holder": 5}'], ids=len
)
def test_finds_no_holder_in_a_note_that_is_none(data: bytes) -> None:
    """JSON that is too deep is a RecursionError, and a number that is too large for a float an OverflowError."""
    read_note(data)
    assert lock._holder(data) is None
    assert state.state_of(data) == state.BEGUN


def test_refuses_a_url_with_a_zero_byte() -> None:
    """Of a home folder it is a ValueError."""
    with pytest.raises(InvalidURLError):
        read_url(b"~\0me/x")


@pytest.mark.parametrize("data", [b"R", b"0.", b"\x80\x02K\x05Q."], ids=repr)
def test_finds_no_tensors_in_pickles_at_which_torchs_own_unpickler_stumbles(data: bytes) -> None:
    with pytest.raises(BucketpointError):
        decode_item(memoryview(bytearray(data)), whole(data), None, key="k")


def test_refuses_an_archive_with_longer_storage_than_stated_before_torch_meets_it() -> None:
    data, longer = saved({"w": torch.arange(4, dtype=torch.uint8)}), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(longer, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"7 bytes" if name.endswith("/data/0") else b""))
    read_item(data)
    with pytest.raises(BucketpointError):
        read_item(longer.getvalue())
