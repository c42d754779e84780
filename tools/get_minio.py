"""Finds or obtains a MinIO server binary and prints its path. Standard library only: any Python 3.10+ runs it.

Order: `$MINIO`, `minio` on the PATH, the checkout's cache, the official release binary, `go install`.
"""

from __future__ import annotations

import sys

from go_server import ARCH, GoServer, Release

RELEASES = "https://dl.min.io/server/minio/release"


def _release(system: str, machine: str) -> Release | None:
    if machine not in ARCH:
        return None
    name = "minio.exe" if system == "Windows" else "minio"
    url = f"{RELEASES}/{system.lower()}-{ARCH[machine]}/{name}"
    return Release(url, f"{url}.sha256sum")


SERVER = GoServer("minio", "MINIO", "github.com/minio/minio@latest", "--version", _release)
find = SERVER.find
obtain = SERVER.obtain

if __name__ == "__main__":
    sys.exit(SERVER.main(__doc__))
