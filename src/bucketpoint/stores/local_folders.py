"""Folders and files below a root, opened one level at a time from the root, so that no symbolic link is followed."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

# O_PATH needs only the permission to enter a folder, and not the permission to list it.
_PASS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_LIST = os.O_DIRECTORY | os.O_CLOEXEC | os.O_RDONLY

# Several, because a concurrent delete may prune an empty folder between its creation and the first file in it.
ATTEMPTS = 20

HIDDEN = ".bucketpoint-"
"""Prefix of the names of files and folders that are not objects."""


TEMPORARY = HIDDEN + "tmp-"
_LONGEST_NAMED = 100
"""Bytes of the longest object name that a hidden name may contain: the hidden name must fit into one file name."""

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe would otherwise wait for a writer.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

_IS_LINK = (errno.ELOOP, errno.EMLINK)
"""Error numbers of O_NOFOLLOW for a link: EMLINK on FreeBSD, ELOOP elsewhere."""

_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""Errors of filesystems that cannot sync folders, such as some on FUSE."""


_SPACE = "A prune needs space for notes: delete one checkpoint's folder by hand, then run `bucketpoint prune`"
REMEDIES = {
    errno.ENOSPC: f"Free space on the disk. {_SPACE}",
    errno.EDQUOT: f"The quota of the user or the project is used up. {_SPACE}",
    errno.EROFS: "Mount the filesystem for writing, or pass another folder",
    errno.EFBIG: "Raise the limit on the size of a file (`ulimit -f`), or save objects of fewer bytes",
    errno.ENAMETOOLONG: "Pass a shorter path: a name has at most 255 bytes",
    errno.EIO: "Check the disk, or the connection to the file server (`dmesg`)",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "Give this user the rights to this path: a trainer needs to write and to enter, a reader to read and to enter",
    ),
}
"""Remedies for failures of the filesystem, by error number."""


class LinkError(OSError):
    """A name below the root is a symbolic link that is not followed, because it may lead out of the root."""

    def __init__(self, path: str, *, is_folder: bool = False) -> None:
        why = "no folder below the root may be one" if is_folder else "it leads out of the root"
        super().__init__(errno.ELOOP, f"{path} is a symbolic link, and {why}", path)
        self.is_folder = is_folder


def split(key: str) -> tuple[builtins.list[str], str]:
    """Split a key into the names of the folders above the object, and the object's name. Repeated slashes count as one.

    Raises:
        OSError: a name is `..`, which would lead out of the root.
    """
    above, _, name = key.rpartition("/")
    names = [part for part in above.split("/") if part not in ("", ".")]
    if ".." in (*names, name):
        raise OSError(errno.EINVAL, "a key may not contain '..'", key)
    return names, name or "."


def quote(unique: str, name: str) -> str:
    """Return `unique`, followed by the object's name unless that is too long, so that a listing shows the object."""
    return f"{unique}-{name}" if len(os.fsencode(name)) <= _LONGEST_NAMED else unique


def temporary(unique: str, name: str) -> str:
    """Return the name of a file that is written before it gets the object's name, or that locks the object."""
    return TEMPORARY + quote(unique, name)


def open_file(name: str, above: int, *, follow: bool = False) -> int:
    """Open a file for reading. A pipe, a device or a folder counts as missing, without a wait.

    Args:
        follow: follow links, wherever they lead. Otherwise a link raises LinkError.
    """
    try:
        fd = os.open(name, _READ | (0 if follow else os.O_NOFOLLOW), dir_fd=above)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FileNotFoundError(errno.ENOENT, "a socket, not a file", name) from None
        if follow or error.errno not in _IS_LINK:
            raise
        raise LinkError(name) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a file", name)
    return fd


def beneath(key: str, target: str) -> str | None:
    """Return the key that a link at `key` leads to; None if the link leaves the root.

    No folder below the root is a link, so `..` leads to the folder above.
    """
    names = split(key)[0]
    for part in target.split("/"):
        if part == ".." and names:
            names.pop()
        elif part == "..":
            return None
        elif part not in ("", "."):
            names.append(part)
    return None if target.startswith("/") else "/".join(names)


@contextlib.contextmanager
def folder(root: str, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open the folder `names` below the root. The root itself may be a link, and its path may contain links.

    Args:
        make: create missing folders. Each one is synced to the disk before anything is put in it.

    Raises:
        LinkError: one of the names is a link.
        FileNotFoundError, NotADirectoryError: one of the names does not exist, or is a file.
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
    """Call `act` with the folder `names`, created if missing; call it again if the folder was pruned meanwhile."""
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
    """Open the folder `name` in the folder `above`. Raises NotADirectoryError if `name` is a link."""
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
            raise LinkError(path, is_folder=True) from None
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
    """Write the entries of a folder to the disk. Without this, a crash of the machine may lose a new file or folder."""
    own = os.open(".", _LIST, dir_fd=fd)
    try:
        os.fsync(own)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(own)


def scan(fd: int) -> builtins.list[tuple[str, bool]]:
    """List a folder in key order: pairs of name and is-folder, the names of folders with a slash at the end.

    A link counts as a file, even if it leads to a folder: the contents of that folder do not belong to this one.
    """
    own = os.open(".", _LIST, dir_fd=fd)
    try:
        with os.scandir(own) as entries:
            listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    finally:
        os.close(own)
    return sorted((name + "/" if is_dir else name, is_dir) for name, is_dir in listed if not name.startswith(HIDDEN))


def prune(root: str, names: Sequence[str]) -> None:
    """Remove the folder `names` and the folders above it as long as they are empty, but not the root."""
    for depth in range(len(names), 0, -1):
        try:
            with folder(root, names[: depth - 1]) as above:
                os.rmdir(names[depth - 1], dir_fd=above)
        except OSError:
            return  # not empty, or gone already


def remove(name: str, above: int) -> None:
    """Remove the folder `name` with the files in it. Raises FileNotFoundError."""
    fd = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=above)
    try:
        for entry in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=above)
