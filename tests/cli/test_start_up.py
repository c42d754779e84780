"""What a command imports before it can answer: those that only look at checkpoints never wait for torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import save
from cli.test_retention import save_run, write
from cli.test_seen import save_with_torch

PROGRAM = """
import sys
from bucketpoint.cli.app import run
code = run(sys.argv[1:])
print(code, sorted({"torch", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


def started(*arguments: str) -> str:
    """The exit code and which large libraries a process of its own had imported at its end."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("started") / "run"
    save_run(str(root), 1, 2, 3)
    save(str(root / "step-4"))
    save_with_torch(root / "step-5")
    write(root.parent, str(root))
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "{run}"],
        ["ls", "{run}", "--all", "--json"],
        ["prune", "{run}/../policy.yaml", "--dry-run"],
        ["overview", "{run}"],
        ["show", "{run}/step-3", "--tensors"],
        ["show", "{run}/step-4"],
        ["show", "{run}/step-5", "--json"],
        ["diff", "{run}/step-4", "{run}/step-4", "--values"],
        ["pin", "{run}", "2"],
        ["pin", "{run}", "2", "--remove"],
        ["report", "{run}", "2", "loss=1"],
        ["gc", "{run}", "--adopt"],
        ["gc", "{run}", "--dry-run"],
        ["doctor", "{run}", "--size", "0"],
        ["watch", "{run}", "--policy", "{run}/../policy.yaml"],
        ["overview", "{run}", "--policy", "{run}/../policy.yaml", "--html", "{run}/../page.html"],
        ["rm", "{run}/step-1", "--yes"],
        ["rollback", "{run}", "4"],
    ],
    ids=" ".join,
)
def test_imports_no_torch_where_only_metadata_is_looked_at(run: Path, arguments: list[str]) -> None:
    assert started(*(one.format(run=run) for one in arguments)) == "0 []"
