"""Resharding on real ranks: FSDP2, TP with FSDP2 and HSDP models, and ShardedTensors of FSDP1."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp import reshard_scenarios as scenarios
from dcp.ranks import Ranks

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("saved", "ranks", "placement", "loaded"),
    [
        ("tp and fsdp", 4, "_S", [("fsdp", 4), ("hsdp", 4), ("plain", 1)]),
        ("hsdp", 4, "Replicate", [("fsdp", 3), ("tp and fsdp", 4)]),
        ("fsdp", 3, "Shard", [("tp and fsdp", 4), ("plain", 1)]),
    ],
)
def test_loads_a_model_under_any_other_parallelism(
    four_ranks: Ranks, tmp_path: Path, saved: str, ranks: int, placement: str, loaded: list[tuple[str, int]]
) -> None:
    url = f"file://{tmp_path}/model"
    placements = four_ranks.run(scenarios.save_model, url, saved, ranks)[0]
    assert any(placement in text for text in placements), placements
    for kind, readers in loaded:
        four_ranks.run(scenarios.load_model, url, kind, readers)


def test_loads_a_model_under_fsdp1_with_fewer_rows_than_ranks(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(scenarios.fsdp1_with_fewer_rows_than_ranks, f"file://{tmp_path}/model")
