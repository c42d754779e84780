"""How a server is reached: what contenders find in their environment, and a proxy in front of it. No measuring."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from bench.proxy_process import RunningProxy, running_proxy
from kit.certificates import make_certificates
from kit.http import Wire
from kit.servers import S3Server, free_port


def client_env(server: S3Server) -> dict[str, str]:
    """What points every contender at the server: the standard names, and OpenSSL's own for the CRT and for Go."""
    env = {**server.env, "NO_PROXY": "127.0.0.1"}
    return env if server.ca is None else {**env, "SSL_CERT_FILE": str(server.ca)}


@contextlib.contextmanager
def proxied(scratch: Path, plain: S3Server, wire: Wire, *, workers: int = 2) -> Iterator[tuple[S3Server, RunningProxy]]:
    """A TLS endpoint in front of a plain server, so that the proxy's own work is one encryption and not two.

    Args:
        workers: processes of the proxy. A rate of all connections together needs one.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    ca = make_certificates(folder)
    parts = urlsplit(plain.endpoint)
    with running_proxy(
        (str(parts.hostname), int(parts.port or 80)),
        cert=folder / "public.crt",
        key=folder / "private.key",
        port=free_port(),
        log_dir=folder / "log",
        wire=wire,
        workers=workers,
    ) as proxy:
        yield S3Server("minio", proxy.url, plain.key, plain.secret, ca=ca), proxy


def empty(server: S3Server, bucket: str, fast: Path, prefix: str = "") -> None:
    """Free the memory that what lies below a prefix takes up in a MinIO server whose data is below `fast`."""
    client = server.client()
    for key in server.keys(bucket, prefix):
        client.delete_object(Bucket=bucket, Key=key)
    # MinIO only moves what is deleted, and frees it minutes later: too late for a folder in memory.
    for trash in fast.glob("*/.minio.sys/tmp/.trash/*"):
        shutil.rmtree(trash, ignore_errors=True)
