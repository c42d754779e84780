"""Finds or obtains a MinIO server binary and prints its path. Standard library only: any Python 3.10+ runs it.

Order: `$MINIO`, `minio` on the PATH, the checkout's cache, the official release binary, `go install`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bin"
RELEASES = "https://dl.min.io/server/minio/release"
GO_PACKAGE = "github.com/minio/minio@latest"
CONNECT_TIMEOUT_S = 10
GO_TIMEOUT_S = 1500
RUN_TIMEOUT_S = 30
LOG_TAIL = 3000

_GOARCH = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64le"}


def find(cache: Path = CACHE) -> Path | None:
    """A binary that is already here, or None. Never touches the network."""
    named = os.environ.get("MINIO")
    if named:
        path = shutil.which(named)
        if path is None:
            raise SystemExit(f"$MINIO is {named!r}, which is not an executable file: correct it or unset it.")
        return Path(path).resolve()
    on_path = shutil.which("minio")
    if on_path:
        return Path(on_path).resolve()
    cached = cache / _binary_name()
    return cached if os.access(cached, os.X_OK) else None


def obtain(cache: Path = CACHE, *, build: bool = True) -> Path | None:
    """A binary that is already here, else a downloaded one, else one built from source, else None."""
    found = find(cache)
    if found is not None:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    return _download(cache) or (_build(cache) if build else None)


def _download(cache: Path) -> Path | None:
    arch = _GOARCH.get(platform.machine().lower())
    if arch is None:
        _say(f"no official MinIO binary is known for {platform.machine()}")
        return None
    url = f"{RELEASES}/{platform.system().lower()}-{arch}/{_binary_name()}"
    _say(f"downloading {url}")
    part = None
    try:
        expected = _read(f"{url}.sha256sum").decode().split()[0]
        # A temporary name in the same folder: a half-written binary never carries the final name.
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as out:
            part = Path(out.name)
            digest = hashlib.sha256()
            with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S, context=_tls()) as answer:
                while block := answer.read(1 << 20):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != expected:
            _say(f"the download's SHA-256 is {digest.hexdigest()}, the release says {expected}: refused")
            return None
        return _install(part, cache)
    except (OSError, HTTPException, ValueError, IndexError) as error:
        _say(f"the official binary could not be had: {error}")
        return None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _build(cache: Path) -> Path | None:
    go = shutil.which("go")
    if go is None:
        _say("there is no Go toolchain to build MinIO with")
        return None
    _say(f"building MinIO with `go install {GO_PACKAGE}`; this takes some minutes, once")
    with tempfile.TemporaryDirectory(dir=cache) as gobin:
        try:
            # -modcacherw: Go's read-only modules would keep a temporary home from being deleted.
            build = subprocess.run(
                [go, "install", "-modcacherw", GO_PACKAGE],
                env={**os.environ, "GOBIN": gobin, "CGO_ENABLED": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=GO_TIMEOUT_S,
            )
            if build.returncode:
                _say(f"MinIO could not be built:\n{build.stdout[-LOG_TAIL:]}")
                return None
            return _install(Path(gobin) / _binary_name(), cache)
        except (OSError, subprocess.SubprocessError) as error:
            _say(f"MinIO could not be built: {error}")
            return None


def _install(binary: Path, cache: Path) -> Path | None:
    binary.chmod(0o755)
    try:
        subprocess.run([binary, "--version"], check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"the MinIO binary does not run here: {error}")
        return None
    return binary.replace(cache / _binary_name())


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S, context=_tls()) as answer:
        body: bytes = answer.read()
        return body


def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _binary_name() -> str:
    return "minio.exe" if os.name == "nt" else "minio"


def _say(message: str) -> None:
    sys.stderr.write(f"get_minio: {message}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-build", action="store_true", help="take what is here or can be downloaded; never compile")
    parser.add_argument("--no-network", action="store_true", help="only look; neither download nor compile")
    args = parser.parse_args()
    found = find() if args.no_network else obtain(build=not args.no_build)
    if found is None:
        _say("no MinIO server: put `minio` on the PATH, set $MINIO, or install Go")
        return 1
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
