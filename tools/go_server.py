"""How a test server that is written in Go is found, downloaded or built. Which server is the caller's to say.

Standard library only: any Python 3.10+ runs it.
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
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "bin"
CONNECT_TIMEOUT_S = 10
GO_TIMEOUT_S = 1500
RUN_TIMEOUT_S = 30
LOG_TAIL = 3000
BLOCK_BYTES = 1 << 20

ARCH = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64le"}
"""What Go calls the machines that `platform.machine` knows."""


@dataclass(frozen=True)
class Release:
    """A file of a release, and the file that has its SHA-256: alone, or in a line for each file of the release."""

    url: str
    sums_url: str


@dataclass(frozen=True)
class GoServer:
    """A server that is one program.

    Attributes:
        name: of the program, on the PATH and in the cache.
        variable: the environment variable that may name it.
        package: what `go install` builds it from.
        proof: arguments with which it ends at once and well, on the kind of machine that it was built for.
        release: its official build for an operating system and a machine, None where there is none. The program itself,
            or a .tar.gz that has it.
    """

    name: str
    variable: str
    package: str
    proof: str
    release: Callable[[str, str], Release | None]

    def find(self, cache: Path = CACHE) -> Path | None:
        """A binary that is already here, or None. Never touches the network."""
        named = os.environ.get(self.variable)
        if named:
            path = shutil.which(named)
            if path is None:
                raise SystemExit(
                    f"${self.variable} is {named!r}, which is not an executable file: correct it or unset it."
                )
            return Path(path).resolve()
        on_path = shutil.which(self.name)
        if on_path:
            return Path(on_path).resolve()
        cached = cache / self._file
        return cached if os.access(cached, os.X_OK) else None

    def obtain(self, cache: Path = CACHE, *, build: bool = True) -> Path | None:
        """A binary that is already here, else a downloaded one, else one built from source, else None.

        Of several processes that ask for it, one downloads or builds it, and the others wait.
        """
        found = self.find(cache)
        if found is not None:
            return found
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{self.name}.lock"):
            return self.find(cache) or self._download(cache) or (self._build(cache) if build else None)

    def main(self, description: str | None) -> int:
        """The command line of the tool for this server."""
        parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
        parser.add_argument(
            "--no-build", action="store_true", help="take what is here or can be downloaded; never compile"
        )
        parser.add_argument("--no-network", action="store_true", help="only look; neither download nor compile")
        args = parser.parse_args()
        found = self.find() if args.no_network else self.obtain(build=not args.no_build)
        if found is None:
            self._say(f"no {self.name}: put it on the PATH, set ${self.variable}, or install Go")
            return 1
        sys.stdout.write(f"{found}\n")
        return 0

    @property
    def _file(self) -> str:
        return f"{self.name}.exe" if os.name == "nt" else self.name

    def _download(self, cache: Path) -> Path | None:
        release = self.release(platform.system(), platform.machine().lower())
        if release is None:
            self._say(f"no official build is known for {platform.system()} on {platform.machine()}")
            return None
        self._say(f"downloading {release.url}")
        try:
            # Temporary names in the cache's folder: a half-written binary never carries the final name.
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                fetched = Path(folder) / "fetched"
                found = _fetch(release.url, fetched)
                expected = _sum_of(release)
                if found != expected:
                    self._say(f"the download's SHA-256 is {found}, the release says {expected}: refused")
                    return None
                return self._install(self._unpacked(fetched, release), cache)
        except (OSError, HTTPException, ValueError, LookupError, tarfile.TarError) as error:
            self._say(f"the official build could not be had: {error}")
            return None

    def _unpacked(self, fetched: Path, release: Release) -> Path:
        if not release.url.endswith(".tar.gz"):
            return fetched
        binary = fetched.with_name(self._file)
        with tarfile.open(fetched) as tar:
            files = [member for member in tar if member.isfile() and Path(member.name).name == self._file]
            source = tar.extractfile(files[0])
            if source is None:
                raise KeyError(self._file)
            with binary.open("wb") as out:
                shutil.copyfileobj(source, out)
        return binary

    def _build(self, cache: Path) -> Path | None:
        go = shutil.which("go")
        if go is None:
            self._say(f"there is no Go toolchain to build {self.name} with")
            return None
        self._say(f"building it with `go install {self.package}`; this takes some minutes, once")
        with tempfile.TemporaryDirectory(dir=cache) as gobin:
            try:
                # -modcacherw: Go's read-only modules would keep a temporary home from being deleted. Without what a
                # debugger reads, MinIO takes 250 instead of 312 seconds of processor time.
                build = subprocess.run(
                    [go, "install", "-modcacherw", "-gcflags=all=-dwarf=false", "-ldflags=-s -w", self.package],
                    env={**os.environ, "GOBIN": gobin, "CGO_ENABLED": "0"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=GO_TIMEOUT_S,
                )
                if build.returncode:
                    self._say(f"{self.name} could not be built:\n{build.stdout[-LOG_TAIL:]}")
                    return None
                return self._install(Path(gobin) / self._file, cache)
            except (OSError, subprocess.SubprocessError) as error:
                self._say(f"{self.name} could not be built: {error}")
                return None

    def _install(self, binary: Path, cache: Path) -> Path | None:
        binary.chmod(0o755)
        try:
            subprocess.run([binary, self.proof], check=True, capture_output=True, timeout=RUN_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            self._say(f"the {self.name} binary does not run here: {error}")
            return None
        return binary.replace(cache / self._file)

    def _say(self, message: str) -> None:
        sys.stderr.write(f"{self.name}: {message}\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Windows has no fcntl; there, two processes may build the same program.
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(url: str, path: Path) -> str:
    """Download to `path`. The SHA-256 of what came."""
    digest = hashlib.sha256()
    with (
        urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S, context=ssl.create_default_context()) as answer,
        path.open("wb") as out,
    ):
        while block := answer.read(BLOCK_BYTES):
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def _sum_of(release: Release) -> str:
    with urllib.request.urlopen(
        release.sums_url, timeout=CONNECT_TIMEOUT_S, context=ssl.create_default_context()
    ) as answer:
        lines = [line.split() for line in answer.read().decode().splitlines() if line.strip()]
    name = release.url.rpartition("/")[2]
    named = [line[0] for line in lines if len(lines) == 1 or line[-1].lstrip("*") == name]
    return str(named[0])
