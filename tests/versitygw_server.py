"""versitygw on 127.0.0.1 for tests: an S3 server on a folder of this machine. No pytest here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.servers import REGION, S3Server, _running


@contextmanager
def versitygw(binary: Path) -> Iterator[S3Server]:
    """A server on a temporary folder. It keeps what it knows of objects beside them, as few filesystems keep xattrs."""
    key, secret = "bucketpoint", os.urandom(16).hex()

    def command(scratch: Path, port: int) -> list[str]:
        for name in ("data", "sidecar"):
            (scratch / name).mkdir()
        address = f"127.0.0.1:{port}"
        return [
            *(str(binary), "--access", key, "--secret", secret, "--region", REGION, "--port", address, "--quiet"),
            *("posix", "--sidecar", str(scratch / "sidecar"), str(scratch / "data")),
        ]

    with _running(command, {}) as (_, port, pid):
        yield S3Server("versitygw", f"http://127.0.0.1:{port}", key, secret, pid=pid)
