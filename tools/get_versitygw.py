"""Finds or obtains a versitygw binary and prints its path. Standard library only: any Python 3.10+ runs it.

Order: `$VERSITYGW`, `versitygw` on the PATH, the checkout's cache, the release binary, `go install`.
"""

from __future__ import annotations

import sys

from go_server import ARCH, GoServer, Release

VERSION = "1.8.0"
REPOSITORY = "github.com/versity/versitygw"
RELEASES = f"https://{REPOSITORY}/releases/download/v{VERSION}"

# As `uname` says it, which is how its releases are named.
_UNAME = {"amd64": "x86_64", "arm64": "arm64"}


def _release(system: str, machine: str) -> Release | None:
    arch = _UNAME.get(ARCH.get(machine, ""))
    if arch is None:
        return None
    return Release(f"{RELEASES}/versitygw_v{VERSION}_{system}_{arch}.tar.gz", f"{RELEASES}/checksums.txt")


SERVER = GoServer("versitygw", "VERSITYGW", f"{REPOSITORY}/cmd/versitygw@v{VERSION}", "--version", _release)
find = SERVER.find
obtain = SERVER.obtain

if __name__ == "__main__":
    sys.exit(SERVER.main(__doc__))
