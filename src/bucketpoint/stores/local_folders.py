"""Folders below a root, opened one after the other from there, so that no link is followed on the way."""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

# A folder that one may pass through need not be one that may be listed.
_PASS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_LIST = os.O_DIRECTORY | os.O_CLOEXEC | os.O_RDONLY

# A folder may be pruned by a delete between its making and the first file in it.
ATTEMPTS = 20

HIDDEN = ".bucketpoint-"
"""The beginning of the names of files and folders that are no objects."""


class LinkedFolderError(OSError):
    """A folder below the root is a symbolic link, which may lead anywhere."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, f"{path} is a symbolic link, and no folder below the root may be one", path)


def split(key: str) -> tuple[builtins.list[str], str]:
    """The names of the folders above an object, and its own. Slashes in a row are one.

    Raises:
        OSError: a name is `..`, which would lead out of the root.
    """
    above, _, name = key.rpartition("/")
    names = [part for part in above.split("/") if part not in ("", ".")]
    if ".." in (*names, name):
        raise OSError(errno.EINVAL, "a key may not contain '..'", key)
    return names, name or "."


@contextlib.contextmanager
def folder(root: str, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open the folder of these names below the root, which may itself be a link, and be reached through links.

    Args:
        make: make what is not there, each folder on the disk before anything is in it.

    Raises:
        LinkedFolderError: one of the names is that of a link.
        FileNotFoundError, NotADirectoryError: one is that of nothing, or of a file.
    """
    if make:
        _make_root(os.path.abspath(root))
    fd, path = os.open(root, _PASS), root
    try:
        for name in names:
            path = os.path.join(path, name)
            inner = _entered(fd, name, path, make=make)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def in_folder(root: str, names: Sequence[str], act: Callable[[int], T]) -> T:
    """Call `act` with the folder of these names, and again with a new one if the folder was pruned meanwhile."""
    for attempt in range(ATTEMPTS):
        try:
            with folder(root, names, make=True) as above:
                return act(above)
        except FileNotFoundError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def enter(above: int, name: str) -> Iterator[int]:
    """Open a folder in a folder. Raises NotADirectoryError if it is a link."""
    fd = os.open(name, _PASS | os.O_NOFOLLOW, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)


def _entered(above: int, name: str, path: str, *, make: bool) -> int:
    try:
        return os.open(name, _PASS | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    except OSError:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise LinkedFolderError(path) from None
        raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
        sync(above)
    return _entered(above, name, path, make=False)


def _make_root(path: str) -> None:
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_root(above)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        fd = os.open(above, _PASS)
        try:
            sync(fd)
        finally:
            os.close(fd)


def sync(fd: int) -> None:
    """Write the names in a folder to the disk: without it a crash of the machine may lose a new file or folder."""
    own = os.open(".", _LIST, dir_fd=fd)
    try:
        os.fsync(own)
    finally:
        os.close(own)


@contextlib.contextmanager
def locked(fd: int, *, needed: bool) -> Iterator[None]:
    """Keep others who change this folder out while an ETag is compared. It is the folder itself that is locked."""
    own = os.open(".", _LIST, dir_fd=fd)
    try:
        try:
            fcntl.flock(own, fcntl.LOCK_EX)
        except OSError:
            # Some network filesystems cannot; then a plain put still can, and only a condition cannot be kept.
            if needed:
                raise
        yield
    finally:
        os.close(own)


def scan(fd: int) -> builtins.list[tuple[str, bool]]:
    """List a folder: names, and whether each is a folder's, which then has a slash at its end. In the order of keys.

    Links to folders are left out: what lies there is another folder's.
    """
    own = os.open(".", _LIST, dir_fd=fd)
    try:
        with os.scandir(own) as entries:
            found = [(entry.name, entry.is_dir(), entry.is_symlink()) for entry in entries]
    finally:
        os.close(own)
    return sorted(
        (name + "/" if is_dir else name, is_dir)
        for name, is_dir, is_link in found
        if not name.startswith(HIDDEN) and not (is_dir and is_link)
    )


def prune(root: str, names: Sequence[str]) -> None:
    """Remove the folder of these names and those above it that are empty, but not the root."""
    for depth in range(len(names), 0, -1):
        try:
            with folder(root, names[: depth - 1]) as above:
                os.rmdir(names[depth - 1], dir_fd=above)
        except OSError:
            return  # not empty, or gone already


def remove(name: str, above: int) -> None:
    """Remove a folder with the files in it. Raises FileNotFoundError."""
    fd = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=above)
    try:
        for entry in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=above)
