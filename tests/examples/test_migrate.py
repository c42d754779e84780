"""The lines that docs/quickstart.md changes in a program of another library."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bucketpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"


def changes() -> dict[str, tuple[str, str]]:
    """The lines before and after, by the heading of each library."""
    found = {}
    for title, diff in re.findall(r"^#+ ([^\n]*)\n\n```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        before, after = ([line[1:] for line in diff.splitlines() if line[0] == sign] for sign in "-+")
        found[title] = ("\n".join(before), "\n".join(after))
    return found


@pytest.mark.parametrize("library", changes())
def test_compiles_the_lines_and_finds_what_they_import_from_bucketpoint(library: str) -> None:
    for lines in changes()[library]:
        for node in ast.walk(ast.parse(lines)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bucketpoint"):
                assert {alias.name for alias in node.names} <= {*dir(import_module(node.module or ""))}
    assert len(changes()) == 6


@pytest.mark.parametrize("library", ["s3torchconnector", "FsspecWriter and FileSystemWriter"])
def test_loads_what_the_lines_before_saved_and_saves_with_those_after(
    library: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    before, after = changes()[library]
    names: dict[str, Any] = {"dcp": dcp, "options": {}, "url": f"file://{tmp_path}/run"}
    if library == "s3torchconnector":
        connector = pytest.importorskip("s3torchconnector")
        bucket = request.getfixturevalue("reached").make_bucket()
        names |= {"config": connector.S3ClientConfig(force_path_style=True), "url": f"s3://{bucket}/run"}
        # The server here has no name for each bucket.
        before = before.replace("path=url)", "path=url, s3client_config=config)")

    names["state"] = {"weight": torch.ones(8)}
    exec(before, names)
    loaded = bucketpoint.load(names["url"])
    assert torch.equal(loaded["weight"], torch.ones(8))

    names |= {"url": names["url"] + "-2", "state": {"weight": torch.full((8,), 2.0)}}
    exec(after, names)
    assert torch.equal(bucketpoint.load(names["url"])["weight"], torch.full((8,), 2.0))


def test_saves_and_loads_with_the_lines_for_torch_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    states = []
    for lines in changes()["torch.save"]:
        names: dict[str, Any] = {"torch": torch, "bucketpoint": bucketpoint, "url": "run/step-1"}
        names["state"] = {"weight": torch.ones(8), "scheduler": {"last_epoch": 3}}
        exec(lines, names)
        states.append(names["state"])
    assert all(torch.equal(state["weight"], torch.ones(8)) for state in states)
    assert all(state["scheduler"] == {"last_epoch": 3} for state in states)
