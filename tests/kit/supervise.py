"""Supervisor of one server: ends it, and deletes its directory, as soon as standard input closes.

The pipe closes however the test process ends, even by SIGKILL, so no run of the suite leaves a server behind. This
module imports the standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading

GRACE_S = 5


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
