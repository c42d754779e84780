"""The filesystems that tests run on: memory, files, and those of libraries that may not be here, on real servers."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem

import azurite

IN_PROCESS = ("memory", "file", "dir", "async")
_ON_SERVERS = {
    "s3fs": ("minio", "s3fs:S3FileSystem"),
    "gcsfs": ("gcs", "gcsfs.core:GCSFileSystem"),
    "adlfs": ("azure", "adlfs:AzureBlobFileSystem"),
}
"""The fixture of the server, and the class, of each library's filesystem."""
SERVED = tuple(filter(importlib.util.find_spec, _ON_SERVERS))
"""Those whose library is here: `make test-fsspec` has all of them."""

_GUARANTEES = {
    "memory": ("creates", "replaces"),
    "s3fs": ("creates", "replaces", "checks", "parts"),
    "gcsfs": ("creates", "checks"),
    "adlfs": ("creates", "replaces", "parts"),
}


class OtherFiles(LocalFileSystem):
    """Files through fsspec: those of `LocalFileSystem` itself are read and written without it."""


@dataclass(frozen=True)
class Backend:
    """A filesystem, a place in it that nobody else has, and what a library is expected to guarantee there."""

    name: str
    fs: Any
    root: str
    creates: bool = False
    replaces: bool = False
    checks: bool = False
    parts: bool = False
    left_behind: Callable[[], list[str]] = field(default=list)
    """Names of everything there, open uploads included."""

    @property
    def url(self) -> str:
        return str(self.fs.unstrip_protocol(self.root))


@contextmanager
def backend(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """The filesystem of that name. Skips where its server is not here."""
    guaranteed = dict.fromkeys(_GUARANTEES.get(name, ()), True)
    if name in ("memory", "async"):
        memory = fsspec.filesystem("memory")
        root = f"/backend-{tmp_path.name}-{os.urandom(4).hex()}"

        def left_behind() -> list[str]:
            return [one for one in memory.store if one.startswith(root)]

        fs = memory if name == "memory" else AsyncFileSystemWrapper(memory)
        yield Backend(name, fs, root, left_behind=left_behind, **guaranteed)
        if memory.exists(root):
            memory.rm(root, recursive=True)
    elif name in ("file", "dir"):

        def left_behind() -> list[str]:
            return [str(path) for path in tmp_path.rglob("*") if path.is_file()]

        inside = fsspec.filesystem("dir", path=str(tmp_path), fs=OtherFiles())
        fs, root = (fsspec.filesystem("file"), str(tmp_path)) if name == "file" else (inside, "inside")
        yield Backend(name, fs, root, left_behind=left_behind)
    else:
        fixture, kind = _ON_SERVERS[name]
        server = request.getfixturevalue(fixture)
        bucket = server.make_container() if name == "adlfs" else server.make_bucket()
        of_gcs = {"token": "anon", "project": "test", "endpoint_url": server.endpoint}
        fs = pkgutil.resolve_name(kind)(**(of_gcs if name == "gcsfs" else server.options))

        def left_behind() -> list[str]:
            if name == "adlfs":
                return [one for one in fs.find(bucket) if not one.endswith("/")]
            return [*server.keys(bucket), *server.open_uploads(bucket, "run/up/load")]

        yield Backend(name, fs, f"{bucket}/run", left_behind=left_behind, **guaranteed)


@contextmanager
def azure_server() -> Iterator[azurite.AzureServer]:
    """Azurite, or a skip that says what is missing."""
    binary = azurite.find()
    if binary is None:
        pytest.skip("there is no Azurite here: `npm install --prefix .cache/azurite azurite`, or set $AZURITE")
    with azurite.azurite(binary) as server:
        yield server
