"""Findings about the guarantees of an fsspec filesystem, from the known features of its library and from a trial."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from bucketpoint.doctor.bucket import Finding
from bucketpoint.errors import StoreError
from bucketpoint.stores import FsspecStore

_LOOKS = "looks, writes, and looks again"
_SUMS = "A load compares what it reads with what was saved"


def fsspec_findings(store: FsspecStore, prefix: str) -> Iterator[Finding]:
    """Yield one finding per guarantee, after a trial below `prefix` unless this process has made it already."""
    driver = store.driver
    yield Finding("filesystem", "ok", f"{_library(store)}: {_reads(store)}")
    try:
        able = store.prove(prefix)
    except StoreError as error:
        yield Finding("conditional commit", "fail", f"it could not be tried out: {error.message}", error.remedy)
        return
    if able.conditional_put:
        whose = "no other process has this filesystem" if driver.private else "the service refuses a second one"
        yield Finding("conditional commit", "ok", f"a new checkpoint is created exclusively: {whose}")
    else:
        yield Finding(
            "conditional commit",
            "warn",
            f"a commit {_LOOKS}: safe against crashes, not against two jobs that save to one URL in one instant",
            "Give every job a URL of its own",
        )
    if able.conditional_put and not able.conditional_replace:
        said = f"what replaces a checkpoint {_LOOKS}: two jobs that overwrite one URL in one instant may collide"
        yield Finding("conditional replace", "warn", said, "Give every save a URL of its own")
    elif able.conditional_put:
        yield Finding("conditional replace", "ok", "a checkpoint is replaced only if it is still the one expected")
    if able.checksums:
        yield Finding(
            "upload checksum", "ok", "the CRC32C that the service has of what it was sent is compared with ours"
        )
    else:
        yield Finding("upload checksum", "skip", f"the service says none of what it was sent. {_SUMS}")
    if able.multipart:
        least = f", from {able.min_part_bytes} bytes on" if able.min_part_bytes > 1 else ""
        yield Finding("parallel parts", "ok", f"parts of one object go up in any order and in parallel{least}")
    else:
        yield Finding("parallel parts", "skip", "objects go up whole, several at a time")


def _library(store: FsspecStore) -> str:
    kind = type(store.fs)
    name = kind.__module__.partition(".")[0]
    try:
        return f"{kind.__name__} of {name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{kind.__name__} of {name}"


def _reads(store: FsspecStore) -> str:
    return "many ranges in one call" if store.capabilities.many_ranges else "one call for each range, on threads"
