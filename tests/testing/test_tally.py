"""What a run has made is told once at its end, whatever number of processes it was made in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kit.proxied_connection import Counts
from kit.tally import Tally

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(6))
def test_kills(bucketpoint_tally, number):
    bucketpoint_tally.made("kills of 1 rank")
    bucketpoint_tally.made("damaged inputs read", 500)
    bucketpoint_tally.requests += 10
    bucketpoint_tally.faults["reset"] += 1
"""


def test_sums_all_workers_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command += ["-p", "kit.plugin", "-n", "2", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"=+ bucketpoint: faults, kills and inputs =+", ran.stdout), ran.stdout
    told = ran.stdout.splitlines()
    for line in ("6 faults in 60 requests", "       6  reset", "6 kills of 1 rank", "3,000 damaged inputs read"):
        assert told.count(line) == 1, ran.stdout


def test_tells_nothing_of_a_run_without_faults() -> None:
    tally = Tally()
    tally.passed(Counts())
    assert tally.lines() == []
