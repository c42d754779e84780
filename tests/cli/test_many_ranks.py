"""Checkpoints that several ranks saved: chunks at offsets, in every kind of cut."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp

from bucketpoint import BucketReader
from bucketpoint.checkpoint.open import open_checkpoint
from cli.conftest import Program
from cli.test_verify import flip, replaced
from dcp import reshard_scenarios as scenarios
from dcp.conftest import four_ranks  # noqa: F401
from dcp.ranks import Ranks


def test_compares_checks_and_copies_chunks_of_many_ranks(
    four_ranks: Ranks,  # noqa: F811
    tmp_path: Path,
    program: Program,
) -> None:
    rows, boxes, copied = (str(tmp_path / name) for name in ("rows", "boxes", "copied"))
    four_ranks.run(scenarios.save_model, f"file://{rows}", "fsdp", 3)
    four_ranks.run(scenarios.save_model, f"file://{boxes}", "tp and fsdp", 4)
    for url, ranks in ((rows, 3), (boxes, 4)):
        done = program("verify", url, "--json")
        assert (done.code, done.json["unchecked_bytes"]) == (0, {}), done.out
        assert program("show", url, "--json").json["world_size"] == ranks
    compared = program("diff", rows, boxes, "--values", "--json").json["values"]
    # The same values, cut by rows on three ranks and by rows and columns on four.
    assert compared["differ"] == []
    assert compared["equal"] > 0
    assert program("cp", boxes, copied, "--verify").code == 0
    state = scenarios.state_of(scenarios.whole_model(seed=2))
    dcp.load(state, checkpoint_id=copied, storage_reader=BucketReader(), no_dist=True)
    scenarios.assert_is_whole(state, seed=1)
    for number, (index, info) in enumerate(open_checkpoint(copied).items):
        if number % 5 == 0:
            replaced(copied, info.path, flip(info.offset + (info.payload_offset or 0)))
            damage = program("verify", copied, "--json").json["damage"]
            assert index.fqn in {one["item"] for one in damage}
