"""What `import bucketpoint` gives, and what it leaves for later."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bucketpoint

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
