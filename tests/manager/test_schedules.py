"""Random schedules of a job of two ranks: none hangs, none loses a commit, and each restart goes on.

BUCKETPOINT_SCHEDULES says how many, BUCKETPOINT_SCHEDULES_SEED from which seed on. A failure names its seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from manager import schedules

NUMBER = int(os.environ.get("BUCKETPOINT_SCHEDULES") or 6)
FIRST = int(os.environ.get("BUCKETPOINT_SCHEDULES_SEED") or 1)


@pytest.mark.timeout(60 + 200 * NUMBER)
def test_hangs_in_no_schedule_loses_no_commit_and_continues_after_each_restart(tmp_path: Path) -> None:
    total: dict[str, int] = {}
    for seed in range(FIRST, FIRST + NUMBER):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            counts = schedules.run(seed, folder)
        except Exception as error:
            raise AssertionError(f"schedule of seed {seed}: {error}") from error
        total = {name: total.get(name, 0) + count for name, count in counts.items()}
    print(f"{NUMBER} schedules: {total}")
    assert total["ranks killed"] > 0
    assert total["restored"] > 0
