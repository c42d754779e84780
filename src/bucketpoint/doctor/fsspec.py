"""Findings about the guarantees of folders and fsspec filesystems, from trials and the known features of libraries."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator

from bucketpoint.doctor.report import Finding
from bucketpoint.errors import StoreError
from bucketpoint.stores import LocalStore, proven
from bucketpoint.stores.fsspec import FsspecStore

_LOCKED = (
    "a checkpoint is replaced and deleted under the lock of its file: safe on one machine, and between machines unless "
    "one of them pauses for minutes"
)
_CHECKS = "a save checks the URL, writes its commit, and checks again"


def folder_finding(store: LocalStore, key: str) -> Finding:
    """Return a finding about the guarantees of a folder, after a trial beside `key`."""
    try:
        linked = store.has_hard_links(key)
    except StoreError as error:
        return Finding("conditional commit", "fail", f"it could not be tried: {error.message}", error.remedy)
    if linked:
        return Finding("conditional commit", "ok", f"a hard link creates a checkpoint, on any machine; {_LOCKED}")
    message = f"the filesystem has no hard links: {_LOCKED.replace('is replaced', 'is created, replaced')}"
    return Finding("conditional commit", "warn", message, "Give every job its own URL")


def fsspec_findings(store: FsspecStore, prefix: str) -> Iterator[Finding]:
    """Yield one finding per guarantee, after a trial below `prefix` unless this process has made it already."""
    kind = type(store.fs)
    name = kind.__module__.partition(".")[0]
    version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = f" {importlib.metadata.version(name)}"
    yield Finding("filesystem", "ok", f"{kind.__name__} of {name}{version}")
    try:
        able = proven(store, prefix)
    except StoreError as error:
        yield Finding("conditional commit", "fail", f"it could not be tried: {error.message}", error.remedy)
        return
    if able.conditional_put:
        reason = "no other process has this filesystem" if store.driver.private else "a second one is refused"
        yield Finding("conditional commit", "ok", f"a new checkpoint is created exclusively: {reason}")
        if able.conditional_replace:
            yield Finding("conditional replace", "ok", "a checkpoint is replaced only if it is still the one expected")
        else:
            message = f"replacing a checkpoint is not atomic: {_CHECKS}. Two jobs that overwrite one URL may collide"
            yield Finding("conditional replace", "warn", message, "Give every save its own URL")
    else:
        message = f"{_CHECKS}: safe against crashes, but not against two jobs that save to one URL at the same time"
        yield Finding("conditional commit", "warn", message, "Give every job its own URL")
    if able.checksums:
        message = "the CRC32C that the service computed is compared with ours"
        yield Finding("upload checksum", "ok", message)
    else:
        message = "the service returns no checksum of its objects. A load compares what it reads with what was saved"
        yield Finding("upload checksum", "skip", message)
    if able.multipart:
        least = f", from {able.min_part_bytes} bytes on" if able.min_part_bytes > 1 else ""
        yield Finding("parallel parts", "ok", f"parts of one object are uploaded in any order and in parallel{least}")
    else:
        yield Finding("parallel parts", "skip", "objects are uploaded whole, several at a time")
