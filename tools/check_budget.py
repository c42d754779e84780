"""Checks sizes against `tools/budget.json`: a commit may lower a number there, and raise one only with a reason."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import bucketpoint
from bucketpoint.cli.app import COMMANDS
from bucketpoint.stores.s3 import S3Options

ROOT = Path(__file__).resolve().parent.parent
BUDGET, DECISIONS = "tools/budget.json", "docs/decisions.md"


def _lines(folder: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py"))


def _words(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def measured() -> dict[str, int]:
    """Return the figures that `tools/budget.json` limits, by their names there."""
    readme = ROOT / "README.md"
    errors = ast.parse((ROOT / "src/bucketpoint/errors.py").read_text(encoding="utf-8"))
    return {
        "source_lines": _lines("src"),
        "source_files": sum(1 for _ in (ROOT / "src").rglob("*.py")),
        "test_lines": _lines("tests"),
        "document_words": _words(readme, *(ROOT / "docs").rglob("*.md")),
        "document_pages": sum(1 for _ in (ROOT / "docs").rglob("*.md")),
        "readme_lines": readme.read_text(encoding="utf-8").count("\n"),
        "public_names": len(bucketpoint.__all__),
        "error_classes": sum(isinstance(node, ast.ClassDef) for node in errors.body),
        "writer_options": len(signature(bucketpoint.BucketWriter).parameters),
        "s3_options": len(fields(S3Options)),
        "commands": len(COMMANDS),
    }


def _committed(revision: str) -> dict[str, int]:
    shown = subprocess.run(
        ["git", "show", f"{revision}:{BUDGET}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return json.loads(shown.stdout) if shown.returncode == 0 else {}


def _changed(path: str, revision: str) -> bool:
    return subprocess.run(["git", "diff", "--quiet", revision, "--", path], cwd=ROOT, check=False).returncode != 0


def faults() -> list[str]:
    """Name each figure above its budget, and each budget that was raised without a change of `docs/decisions.md`."""
    budget = json.loads((ROOT / BUDGET).read_text(encoding="utf-8"))
    found = measured()
    lines = [
        f"{name}: {value}; the budget is {budget[name]}: take something away, or say in {DECISIONS} why it is raised"
        for name, value in found.items()
        if value > budget[name]
    ]
    # The work tree beside the last commit, or that commit beside the one before it. A shallow clone has no such commit.
    revision = "HEAD" if _changed(BUDGET, "HEAD") else "HEAD~1"
    before = _committed(revision)
    raised = [name for name in found if budget[name] > before.get(name, budget[name])]
    if raised and not _changed(DECISIONS, revision):
        lines.append(f"{', '.join(raised)}: raised in {BUDGET} without a sentence in {DECISIONS}")
    return lines


def main() -> int:
    lines = faults()
    print(*lines, f"{len(lines)} budgets exceeded", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
