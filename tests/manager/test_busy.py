"""The manager and training go on talking between ranks while an upload takes its time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketpoint.catalog.catalog import open_catalog
from dcp.ranks import Ranks
from manager import busy_scenarios as scenarios

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("when_busy", ["wait", "skip", "error"])
def test_answers_alike_on_all_ranks_to_every_method_and_trigger_during_an_upload(
    ranks: Ranks, tmp_path: Path, when_busy: str
) -> None:
    root = str(tmp_path / "run")
    first, *others = ranks.run(scenarios.everything_during_a_save, root, when_busy)
    assert all(other == first for other in others)
    triggers = ("idle", "steps", "minutes", "sigusr1", "sigusr2", "last", "sigterm")
    assert {name: first.pop(f"busy {name}") for name in triggers} == {name: name != "idle" for name in triggers}
    said = first.pop("busy save", None)
    if when_busy == "skip":
        assert said == (None, 1)
    elif when_busy == "error":
        assert "the save of step 10 is still running" in said
    else:
        assert first.pop("save") is True
    notes = {f"busy {name}": None for name in ("report", "pin", "unpin")}
    assert first == {
        **notes,
        "first": True,
        "busy listing": [1],
        "busy prune": True,
        "busy wait": False,
        "restore": 1.0,
        "wait": True,
        "stop": True,
    }
    committed = [1, 10, 20, 30] if when_busy == "wait" else [1, 10, 30]
    assert [one.step for one in open_catalog(root).steps().checkpoints] == committed
