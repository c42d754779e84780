"""The worked example of the documentation is what the engine does."""

from __future__ import annotations

import re
from pathlib import Path

from bucketpoint.retention import Row, from_yaml, plan

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/retention.md"


def test_plans_what_the_table_of_the_document_says_of_its_policy() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split("### A policy at work")[1].split("\n## ")[0]
    policy = from_yaml(section.split("```yaml\n")[1].split("```")[0], environ={})
    table = re.findall(r"^\| (\d+) \| (\S*) *\| (\w+) \| (.*) \|$", section, re.MULTILINE)
    assert len(table) == 13
    rows = [
        Row(
            int(step),
            1.7e9 + 3600 * hour,
            "a",
            groups={"model": 1, "optim": 2},
            metrics={"eval/loss": float(loss.strip("*"))} if loss else {},
        )
        for hour, (step, loss, _, _) in enumerate(table)
    ]
    entries = plan(policy, rows).entries
    words = {"keep": "kept", "thin": "thinned", "delete": "deleted"}
    assert [(entry.row.step, words[entry.action]) for entry in entries] == [(int(row[0]), row[2]) for row in table]
    for entry, (step, _, action, why) in zip(entries, table, strict=True):
        if action == "deleted":
            assert entry.miss is not None
            assert why == str(entry.miss), step


def test_runs_the_python_of_the_document() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split("\n## Python\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert blocks
    for code in blocks:
        exec(compile(code, str(DOCUMENT), "exec"), {})
