"""Switches guards of the library off, one after another, and names those that no test notices.

    python tools/try_guards.py                 every entry of tests/guards.yaml, some 3 seconds each
    python tools/try_guards.py stores/ dcp/    those whose source file has one of these texts in its path

Each entry names a source file, the texts that switch its guard off, and the tests that have to fail then. They run in
a copy of the checkout, in children of this process, which has torch and the test tools imported.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
GUARDS = ROOT / "tests" / "guards.yaml"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
LIMIT_S = 180


def switched_off(source: str, edits: list[list[str]]) -> str:
    """Return a file's text with its guard off. Raises `ValueError` unless each text to replace is there once."""
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times in the file, not once: {old}")
        source = source.replace(old, new)
    return source


def _run(copy: Path, tests: str, log: Path) -> int:
    """Run tests in a child that is the leader of a session. Return pytest's exit code, or -1 at the time limit."""
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setsid()
            os.chdir(copy)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["PYTHONPATH"] = f"{copy / 'src'}:{copy}"
            sys.path[:0] = [str(copy / "src"), str(copy)]
            import pytest

            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]))
        finally:
            os._exit(code)
    end = time.monotonic() + LIMIT_S
    while not (waited := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(waited[1])


def _preload() -> None:
    """Import what nearly every test imports, and nothing of bucketpoint, which each child imports from the copy."""
    import boto3  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


def main(wanted: list[str]) -> int:
    entries: dict[str, list[dict[str, Any]]] = yaml.safe_load(GUARDS.read_text(encoding="utf-8"))
    chosen = [
        (file, entry)
        for file, listed in entries.items()
        if not wanted or any(text in file for text in wanted)
        for entry in listed
    ]
    _preload()
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy, log = Path(folder) / "copy", Path(folder) / "log"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        for file, entry in chosen:
            path = copy / file
            source = path.read_text(encoding="utf-8")
            path.write_text(switched_off(source, entry["without"]), encoding="utf-8")
            code = _run(copy, entry["tests"], log)
            path.write_text(source, encoding="utf-8")
            if code == 1:
                continue
            unnoticed += 1
            print(f"{file}: {entry['without'][0][0].strip()}\n  not noticed by {entry['tests']} (exit code {code})")
            print(*log.read_text(errors="replace").splitlines()[-3:], sep="\n", flush=True)
    print(f"{len(chosen)} guards, {unnoticed} unnoticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
