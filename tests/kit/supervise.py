"""Supervisor of one server: ends it, and deletes its directory, as soon as standard input closes.

The pipe closes however the test process ends, even by SIGKILL, so no run of the suite leaves a server behind. This
module imports the standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

GRACE_S = 5
STOP_S = 15


@contextmanager
def supervised(
    scratch: Path, command: list[str], env: Mapping[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and end it and delete its directory with the block."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(scratch), *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        # Ctrl-C at the terminal reaches the caller only, which ends the server.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(scratch: str, command: list[str]) -> int:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end_with_the_parent() -> None:
        sys.stdin.buffer.read()
        server.terminate()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    try:
        return server.wait()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
