"""The filesystems that tests run on: memory, files, and those of libraries that may not be here, on real servers."""

from __future__ import annotations

import importlib
import importlib.util
import os
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
SERVED = tuple(name for name in ("s3fs", "gcsfs", "adlfs") if importlib.util.find_spec(name))
"""Those whose library is here: `make test-fsspec` has all of them."""


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
    """The filesystem of that name. Skips where its library or its server is not here."""
    if name in ("memory", "async"):
        memory = fsspec.filesystem("memory")
        root = f"/backend-{tmp_path.name}-{os.urandom(4).hex()}"
        fs = memory if name == "memory" else AsyncFileSystemWrapper(memory)
        yield Backend(
            name,
            fs,
            root,
            creates=name == "memory",
            replaces=name == "memory",
            left_behind=lambda: [one for one in memory.store if one.startswith(root)],
        )
        memory.rm(root, recursive=True) if memory.exists(root) else None
    elif name == "file":
        yield Backend(name, fsspec.filesystem("file"), str(tmp_path), left_behind=lambda: _files(tmp_path))
    elif name == "dir":
        fs = fsspec.filesystem("dir", path=str(tmp_path), fs=OtherFiles())
        yield Backend(name, fs, "inside", left_behind=lambda: _files(tmp_path))
    elif name == "s3fs":
        library: Any = importlib.import_module("s3fs")
        server = request.getfixturevalue("minio")
        bucket = server.make_bucket()
        fs = library.S3FileSystem(**server.options)
        yield Backend(
            name,
            fs,
            f"{bucket}/run",
            creates=True,
            replaces=True,
            checks=True,
            parts=True,
            left_behind=lambda: server.keys(bucket) + server.open_uploads(bucket, "run/up/load"),
        )
    elif name == "gcsfs":
        library = importlib.import_module("gcsfs")
        server = request.getfixturevalue("gcs")
        bucket = server.make_bucket()
        settings = {"token": "anon", "project": "test", "endpoint_url": server.endpoint}
        fs = library.core.GCSFileSystem(**settings)
        yield Backend(
            name, fs, f"{bucket}/run", creates=True, checks=True, left_behind=lambda: list(server.keys(bucket))
        )
    elif name == "adlfs":
        library = importlib.import_module("adlfs")
        server = request.getfixturevalue("azure")
        container = server.make_container()
        fs = library.AzureBlobFileSystem(**server.options)
        yield Backend(
            name,
            fs,
            f"{container}/run",
            creates=True,
            replaces=True,
            parts=True,
            left_behind=lambda: [one for one in fs.find(container) if not one.endswith("/")],
        )
    else:
        raise ValueError(name)


@contextmanager
def azure_server() -> Iterator[azurite.AzureServer]:
    """Azurite, or a skip that says what is missing."""
    binary = azurite.find()
    if binary is None:
        pytest.skip("there is no Azurite here: `npm install --prefix .cache/azurite azurite`, or set $AZURITE")
    with azurite.azurite(binary) as server:
        yield server


def _files(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]
