"""The list of guards, `guards.yaml`, fits the source: `make guards` runs the tests that it names."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from try_guards import GUARDS, ROOT, switched_off

ENTRIES = yaml.safe_load(GUARDS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", ENTRIES)
def test_finds_each_guard_once_in_its_file_and_its_tests_by_name(file: str) -> None:
    source = Path(ROOT / file).read_text(encoding="utf-8")
    for entry in ENTRIES[file]:
        assert switched_off(source, entry["without"]) != source
        places = [ROOT / part.partition("::")[0] for part in shlex.split(entry["tests"]) if part.startswith("tests")]
        assert places
        texts = "".join(path.read_text(encoding="utf-8") for path in places if path.is_file())
        assert all(path.exists() for path in places)
        assert all(part.partition("::")[2].partition("[")[0] in texts for part in shlex.split(entry["tests"]))
