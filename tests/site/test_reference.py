"""The check of the reference finds what a docstring leaves out, and no more."""

from __future__ import annotations

import griffe
import pytest

import check_reference

COMPLETE = '''
def save(url: str, timeout: float) -> None:
    """Save.

    Args:
        url: the URL.
        timeout: seconds to wait.

    Raises:
        StoreError: the store refused.
    """
    raise StoreError("no")
'''


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("        url: the URL.\n", "", "does not name the parameter url"),
        ("seconds to wait", "how long to wait", "timeout is a duration"),
        ("    Raises:\n        StoreError: the store refused.\n", "", "raises StoreError"),
    ],
    ids=["complete", "parameter", "unit", "error"],
)
def test_finds_a_gap_of_a_docstring(old: str, new: str, fault: str | None) -> None:
    with griffe.temporary_visited_module(COMPLETE.replace(old, new)) as module:
        found = list(check_reference._faults_of(module["save"], "save", {"StoreError"}))
    assert [fault in each for each in found] == [True] if fault is not None else found == []


def test_allows_docstrings_of_their_own_for_fields_of_a_dataclass() -> None:
    code = '''
from dataclasses import dataclass

@dataclass
class Options:
    """Options."""

    part_bytes: int
    """Bytes of a part."""
    gap: int
    """Bytes between two parts."""
    wait: int
'''
    extensions = griffe.load_extensions()
    with griffe.temporary_visited_package("package", {"__init__.py": code}, extensions=extensions) as package:
        (fault,) = check_reference._faults_of(package["Options"], "Options", set())
    assert fault.endswith("does not name the parameter wait")
