"""Finds or obtains a fake-gcs-server binary and prints its path. Standard library only: any Python 3.10+ runs it.

Order: `$FAKE_GCS`, `fake-gcs-server` on the PATH, the checkout's cache, the release binary, `go install`.
"""

from __future__ import annotations

import sys

from go_server import ARCH, GoServer, Release

# Of this version on it knows generations, conditions and checksums as the service does.
VERSION = "1.56.1"
REPOSITORY = "github.com/fsouza/fake-gcs-server"
RELEASES = f"https://{REPOSITORY}/releases/download/v{VERSION}"


def _release(system: str, machine: str) -> Release | None:
    if ARCH.get(machine) not in ("amd64", "arm64"):
        return None
    return Release(f"{RELEASES}/fake-gcs-server_{VERSION}_{system}_{ARCH[machine]}.tar.gz", f"{RELEASES}/checksums.txt")


# It has no flag for its version; a binary of another machine does not even print its help.
SERVER = GoServer("fake-gcs-server", "FAKE_GCS", f"{REPOSITORY}@v{VERSION}", "-help", _release)
find = SERVER.find
obtain = SERVER.obtain

if __name__ == "__main__":
    sys.exit(SERVER.main(__doc__))
