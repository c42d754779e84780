"""Finds or obtains a fake-gcs-server binary and prints its path. Standard library only: any Python 3.10+ runs it.

Order: `$FAKE_GCS`, `fake-gcs-server` on the PATH, the checkout's cache, the release binary, `go install`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bin"
NAME = "fake-gcs-server"
# Of this version on it knows generations, conditions and checksums as the service does.
VERSION = "1.56.1"
RELEASES = f"https://github.com/fsouza/fake-gcs-server/releases/download/v{VERSION}"
GO_PACKAGE = f"github.com/fsouza/fake-gcs-server@v{VERSION}"
CONNECT_TIMEOUT_S = 10
GO_TIMEOUT_S = 1500
RUN_TIMEOUT_S = 30
LOG_TAIL = 3000

_ARCH = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def find(cache: Path = CACHE) -> Path | None:
    """A binary that is already here, or None. Never touches the network."""
    named = os.environ.get("FAKE_GCS")
    if named:
        path = shutil.which(named)
        if path is None:
            raise SystemExit(f"$FAKE_GCS is {named!r}, which is not an executable file: correct it or unset it.")
        return Path(path).resolve()
    on_path = shutil.which(NAME)
    if on_path:
        return Path(on_path).resolve()
    cached = cache / NAME
    return cached if os.access(cached, os.X_OK) else None


def obtain(cache: Path = CACHE, *, build: bool = True) -> Path | None:
    """A binary that is already here, else a downloaded one, else one built from source, else None."""
    found = find(cache)
    if found is not None:
        return found
    cache.mkdir(parents=True, exist_ok=True)
    return _download(cache) or (_build(cache) if build else None)


def _download(cache: Path) -> Path | None:
    arch = _ARCH.get(platform.machine().lower())
    if arch is None:
        _say(f"no release binary is known for {platform.machine()}")
        return None
    archive = f"{NAME}_{VERSION}_{platform.system()}_{arch}.tar.gz"
    _say(f"downloading {RELEASES}/{archive}")
    try:
        lines = _read(f"{RELEASES}/checksums.txt").decode().splitlines()
        sums = {name: digest for digest, name in map(str.split, lines)}
        content = _read(f"{RELEASES}/{archive}")
        found = hashlib.sha256(content).hexdigest()
        if found != sums[archive]:
            _say(f"the download's SHA-256 is {found}, the release says {sums[archive]}: refused")
            return None
        with tarfile.open(fileobj=io.BytesIO(content)) as tar, tempfile.TemporaryDirectory(dir=cache) as folder:
            member = tar.extractfile(NAME)
            if member is None:
                raise KeyError(NAME)
            binary = Path(folder) / NAME
            binary.write_bytes(member.read())
            return _install(binary, cache)
    except (OSError, HTTPException, ValueError, KeyError, tarfile.TarError) as error:
        _say(f"the release binary could not be had: {error}")
        return None


def _build(cache: Path) -> Path | None:
    go = shutil.which("go")
    if go is None:
        _say(f"there is no Go toolchain to build {NAME} with")
        return None
    _say(f"building it with `go install {GO_PACKAGE}`; this takes some minutes, once")
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
                _say(f"{NAME} could not be built:\n{build.stdout[-LOG_TAIL:]}")
                return None
            return _install(Path(gobin) / NAME, cache)
        except (OSError, subprocess.SubprocessError) as error:
            _say(f"{NAME} could not be built: {error}")
            return None


def _install(binary: Path, cache: Path) -> Path | None:
    binary.chmod(0o755)
    try:
        # It has no flag for its version; a binary of another machine does not even print its help.
        subprocess.run([binary, "-help"], check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"the {NAME} binary does not run here: {error}")
        return None
    # A half-written binary never carries the final name.
    return binary.replace(cache / NAME)


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S, context=ssl.create_default_context()) as answer:
        body: bytes = answer.read()
        return body


def _say(message: str) -> None:
    sys.stderr.write(f"get_fake_gcs: {message}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-build", action="store_true", help="take what is here or can be downloaded; never compile")
    parser.add_argument("--no-network", action="store_true", help="only look; neither download nor compile")
    args = parser.parse_args()
    found = find() if args.no_network else obtain(build=not args.no_build)
    if found is None:
        _say(f"no {NAME}: put it on the PATH, set $FAKE_GCS, or install Go")
        return 1
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
