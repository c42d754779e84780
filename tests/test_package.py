"""What `import bucketpoint` gives, and what it leaves for later."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bucketpoint
from bucketpoint import errors

HEAVY = ("torch", "boto3", "botocore", "fsspec", "awscrt")


def test_importing_the_package_imports_nothing_large() -> None:
    program = f"import bucketpoint, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", bucketpoint.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(bucketpoint, name) is not None
    assert name in dir(bucketpoint)


def test_a_name_that_is_not_there_is_missed_like_any_other() -> None:
    with pytest.raises(AttributeError, match="'bucketpoint' has no attribute 'S4Writer'"):
        bucketpoint.S4Writer  # noqa: B018


def test_type_checkers_see_each_public_name_in_the_module_that_gives_it_at_run_time() -> None:
    tree = ast.parse(Path(bucketpoint.__file__).read_text(encoding="utf-8"))
    (typed,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: bucketpoint._ROOMS.get(name, "bucketpoint.dcp") for name in seen}
    assert seen.keys() == {name for name in bucketpoint.__all__ if not hasattr(errors, name)} - {"__version__"}
