"""Finds a version of Python, on the PATH or among those of pyenv, and prints its path. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def find(version: str) -> Path | None:
    """An interpreter of this version, such as "3.13", that runs."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python3"), reverse=True)
    return next((found for found in candidates if _is(found, version)), None)


def _is(interpreter: Path, version: str) -> bool:
    """A version manager's shim is on the PATH even where it has no such version."""
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def main() -> int:
    found = find(sys.argv[1])
    if found is not None:
        print(found)
    return 0 if found is not None else 1


if __name__ == "__main__":
    sys.exit(main())
