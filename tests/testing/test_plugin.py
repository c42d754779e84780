"""The counts of the fault kit, and where it finds MinIO."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import servers
from kit.tally import Tally


def test_adds_up_tallies_of_several_processes() -> None:
    first, second = Tally(), Tally()
    for number, tally in enumerate((first, second), 1):
        tally.made("kills", number)
        tally.faults["reset"] += number
        tally.requests += 10
    second.made("inputs", 5000)
    first.add(second.as_dict())
    assert first.lines() == ["3 faults in 20 requests", "       3  reset", "5,000 inputs", "3 kills"]
    assert Tally().lines() == []


def test_finds_minio_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIO", "/somewhere/minio")
    assert servers.find_minio() == Path("/somewhere/minio")
