"""Draws docs/retention.svg: saves the run of docs/retention.md in memory, and `bucketpoint prune` draws its plan.

    python tools/make_retention_plot.py [FILE.svg]

Policy, steps and metrics are those of the document's section "A policy at work". Run it after a change there, or to the
picture; a test compares.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import fsspec
import torch

from bucketpoint import CheckpointManager
from bucketpoint.cli.app import run
from bucketpoint.retention import Keep, Prune, RetentionPolicy

DOCS = Path(__file__).resolve().parents[1] / "docs"
RUN = "memory://docs/run"
PINNED = 750


def section() -> str:
    text = (DOCS / "retention.md").read_text(encoding="utf-8")
    return text.split("### A policy at work")[1].split("\n## ")[0]


def save(document: str) -> None:
    """One small checkpoint for each line of the table, with its metric."""
    everything = RetentionPolicy(Keep(1000), prune=Prune(when="manual", grace=timedelta(0)))
    state = {"model": {"w": torch.zeros(250_000)}, "optim": {"m": torch.zeros(500_000)}}
    with CheckpointManager(RUN, policy=everything) as manager:
        for step, loss in re.findall(r"^\| (\d+) \| (\S*) *\|", document, re.MULTILINE):
            metrics = {"eval/loss": float(loss.strip("*"))} if loss else None
            manager.save(int(step), state, metrics=metrics)
        manager.pin(PINNED, reason="a release")


def main(arguments: Sequence[str]) -> int:
    picture = arguments[0] if arguments else str(DOCS / "retention.svg")
    document = section()
    policy = document.split("```yaml\n")[1].split("```")[0]
    try:
        save(document)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "policy.yaml")
            # Half of so few checkpoints is soon gone, and the circuit breaker is not what is shown.
            file.write_text(f"{policy}prune: {{max_delete: {{fraction: 1.0}}}}\n", encoding="utf-8")
            return run(["prune", str(file), "--root", RUN, "--dry-run", "--plot", picture])
    finally:
        fsspec.filesystem("memory").rm("/docs/run", recursive=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
