"""The pytest plugin as a user has it: in a project of their own, without this suite's conftest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bucketpoint.testing import servers
from bucketpoint.testing.tally import Tally

NAME = "bucketpoint.testing.plugin"
DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"

CONFTEST = """
import sys

def pytest_sessionstart(session):
    # A run that loads the plugin and uses no fixture of it waits for none of these.
    large = {"torch", "boto3", "moto", "bucketpoint.dcp"} & set(sys.modules)
    assert not large, large
"""

MORE = """

def test_of_mine(bucketpoint_minio, fault_proxy, bucketpoint_tally):
    proxy = fault_proxy(bucketpoint_minio)
    bucketpoint_minio.at(proxy.url).client().list_buckets()
    assert proxy.counts.requests.total() == 1
    bucketpoint_tally.made("cases of mine", 1200)
"""


def test_the_example_of_the_documents_runs_in_a_project_of_its_own(
    bucketpoint_minio_binary: Path, tmp_path: Path
) -> None:
    section = DOCUMENT.read_text().partition("## In pytest")[2]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert example is not None
    (tmp_path / "test_mine.py").write_text(example[1] + MORE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"MINIO": str(bucketpoint_minio_binary), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-p", NAME]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    lines = [line.split() for line in done.stdout.partition("bucketpoint: faults, kills and inputs")[2].splitlines()]
    assert ["1", "reset", "after", "the", "store", "acted"] in lines
    assert ["1,200", "cases", "of", "mine"] in lines


WITHOUT_THE_EXTRA = """
import sys

sys.modules["cryptography"] = sys.modules["moto"] = None

def test_on_minio(bucketpoint_minio): pass
def test_on_moto(bucketpoint_moto): pass
"""


def test_without_the_extra_tests_on_minio_are_skipped_and_moto_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(WITHOUT_THE_EXTRA)
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", NAME]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert "1 skipped, 1 error in" in done.stdout, done.stdout + done.stderr
    assert "pip install 'moto[s3,server]>=5.1'" in done.stdout


def test_tallies_of_several_processes_add_up() -> None:
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
