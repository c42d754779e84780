"""Workflows and the versions that they install: what may publish runs no command, and everything is pinned."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")


def jobs(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / ".github/workflows" / name).read_text(encoding="utf-8"))["jobs"])


def pinned(name: str) -> dict[str, list[str]]:
    """Versions of each package in a file of constraints. Each must have a hash."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "tools" / name).read_text(encoding="utf-8")
    for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        match = re.match(r"([a-z0-9-]+)(?:\[[^]]*\])?==([^ ]+)", entry)
        assert match is not None, entry
        assert "--hash=sha256:" in entry, entry
        found.setdefault(match[1], []).append(match[2])
    return found


def test_pins_every_action_by_commit() -> None:
    used = [use for file in WORKFLOWS for use in re.findall(r"uses: (.*)", file.read_text(encoding="utf-8"))]
    assert len(used) > 10
    assert [use for use in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use)] == []


def test_publishes_in_a_job_that_runs_no_command() -> None:
    release = jobs("release.yml")
    assert release["publish"]["needs"] == ["build", "test"]
    assert not any("run" in step or "checkout" in step["uses"] for step in release["publish"]["steps"])
    for job in ("build", "test"):
        assert release[job]["permissions"] == {"contents": "read"}
    rights = [job for file in WORKFLOWS for job in jobs(file.name).values() if "id-token" in job.get("permissions", {})]
    assert rights == [release["publish"]]


def test_installs_exact_versions_with_hashes_in_every_workflow() -> None:
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert set(workflow["env"].values()) == {"tools/constraints.txt"}
    assert list(pinned("uv.txt")) == ["uv"]


def test_constrains_each_requirement_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    parts = re.findall(
        r"^(?:dependencies|dev|gcs|cli|azure|site|requires) = (\[.*?\]$)", text, re.MULTILINE | re.DOTALL
    )
    parts.append((ROOT / "tools/release.in").read_text(encoding="utf-8").partition("\n")[2])
    names = {
        name.lower().replace("_", "-")
        for part in parts
        for name in re.findall(r'^\s*\[?"?([\w-]+)[\[>=]', part, re.MULTILINE)
    }
    assert len(names) > 30
    assert names - {"bucketpoint"} - set(pinned("constraints.txt")) == set(), "run `make constraints`"
    assert "://" not in (ROOT / "tools/constraints.txt").read_text(encoding="utf-8")


def test_fails_for_an_interpreter_that_was_asked_for_and_is_not_here() -> None:
    command = ["make", "test-python", "PYTHONS=3.99", "-o", "minio", "-o", "fake-gcs", "-o", "versitygw"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "Python 3.99: nothing was tested" in done.stdout
