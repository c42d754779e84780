"""Object keys within a checkpoint's prefix: how they are named, joined and taken apart. No I/O, no torch."""

from __future__ import annotations

import os
import re
import zlib

from bucketpoint.errors import UnsafeDataError
from bucketpoint.format.catalogue import CATALOGUE

METADATA = ".metadata"
"""The commit: DCP's own name for its metadata, so that stock readers find it."""

RECORD = ".bucketpoint.json"
"""The small JSON record beside the metadata. A cache of it, never the truth."""

DATA_FOLDER = "data"

FENCE_FOLDER = f"{CATALOGUE}/fences"
"""Folder of the fences of attempts, within a checkpoint's folder. Trainers and pruners may write and delete there."""

_TOKEN_BYTES = 6
_GROUP = re.compile(r"[A-Za-z0-9_.]+")
_DATA_PATH = re.compile(
    r"data/(?P<entropy>[0-9a-f]{2})/(?P<token>[0-9a-f]{12})-(?P<rank>0|[1-9][0-9]*)"
    r"-(?P<group>[A-Za-z0-9_.]+)-(?P<n>0|[1-9][0-9]*)\.distcp",
    re.ASCII,
)
_DATA_PATH_BYTES = re.compile(rb"data/[0-9a-f]{2}/([0-9a-f]{12})-[0-9]{1,9}-[A-Za-z0-9_.]+-[0-9]{1,9}\.distcp")
_TOKEN = re.compile(r"[0-9a-f]{12}", re.ASCII)
_FENCE_PATH = re.compile(CATALOGUE + r"/fences/(?P<token>[0-9a-f]{12})", re.ASCII)
_RANK_METADATA = re.compile(r"__(0|[1-9][0-9]{0,8})\.metadata", re.ASCII)
_REFUSED_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\\]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:", re.ASCII)


def rank_metadata(rank: int) -> str:
    """The metadata of one rank's part, where a save ran without collectives."""
    if rank < 0:
        raise ValueError(f"rank {rank} is negative")
    return f"__{rank}{METADATA}"


def is_rank_metadata(path: str) -> bool:
    """True if `rank_metadata` makes this path of some rank."""
    return _RANK_METADATA.fullmatch(path) is not None


def fence_path(token: str) -> str:
    """The path of the object that decides whether an attempt commits or is swept."""
    return f"{FENCE_FOLDER}/{token}"


def parse_fence_path(path: str) -> str | None:
    """The token that `fence_path` made this path of, or None for any other path."""
    match = _FENCE_PATH.fullmatch(path)
    return match["token"] if match is not None else None


def new_token() -> str:
    """A token for one attempt to save, which no other attempt shares."""
    # os.urandom and not `random`: every rank of a seeded training run would otherwise draw the same token every time.
    return os.urandom(_TOKEN_BYTES).hex()


def is_token(text: str) -> bool:
    """Whether `new_token` may have made this text."""
    return _TOKEN.fullmatch(text) is not None


def data_path(token: str, rank: int, group: str, n: int) -> str:
    """The path of data object `n` of a rank and an object group.

    The folder spreads the objects of one checkpoint over the store's partitions. It depends on all but the token, so
    that the partitions which the store has split under the load of one save also serve the next at the same URL.
    """
    if not _GROUP.fullmatch(group):
        raise ValueError(f"object group {group!r} must consist of letters, digits, underscores and dots")
    path = f"{DATA_FOLDER}/{_entropy(rank, group, n)}/{token}-{rank}-{group}-{n}.distcp"
    if not _DATA_PATH.fullmatch(path):
        raise ValueError(f"token {token!r}, rank {rank} and number {n} do not make a data path")
    return path


def parse_data_path(path: str) -> tuple[str, int, str, int] | None:
    """The (token, rank, group, n) that `data_path` made this path of, or None for any other path."""
    match = _DATA_PATH.fullmatch(path)
    # Hostile lists may hold digits without end; int() of those is quadratic.
    if match is None or len(path) > 1024:
        return None
    rank, group, n = int(match["rank"]), match["group"], int(match["n"])
    if match["entropy"] != _entropy(rank, group, n):
        return None
    return match["token"], rank, group, n


def tokens_in(data: bytes) -> set[str]:
    """The tokens of all data paths that stand somewhere in `data`, such as a `.metadata` that need not be decoded.

    Each rank of an attempt has a token of its own.
    """
    return {match[1].decode() for match in _DATA_PATH_BYTES.finditer(data)}


def token_of(path: str) -> str | None:
    """The token of the rank and the attempt that a data path was made for, or None for any other path."""
    named = parse_data_path(path)
    return named[0] if named is not None else None


def join(prefix: str, relative: str) -> str:
    """The key of `relative` below `prefix`, which is empty or has no trailing slash.

    Raises:
        UnsafeDataError: `relative`, which may come from metadata that anybody wrote, would leave the prefix.
    """
    reason = _unsafe(relative)
    if reason is not None:
        raise UnsafeDataError(
            f"The metadata names an object path that {reason}: {relative[:200]!r}",
            key=prefix or None,
            remedy="The checkpoint is damaged or hostile; nothing was read through this path",
        )
    return f"{prefix}/{relative}" if prefix else relative


def may_be_data(path: str) -> bool:
    """Whether what lies at a path that metadata names may be deleted with its data: no commit, no record, and nothing
    of a catalogue, whoever wrote that it is data."""
    parts = path.casefold().split("/")
    return not any(part.endswith(METADATA) or part in (RECORD, CATALOGUE) for part in parts)


def _entropy(rank: int, group: str, n: int) -> str:
    return f"{zlib.crc32(f'{rank}/{group}/{n}'.encode()) & 0xFF:02x}"


def _unsafe(relative: str) -> str | None:
    if not relative:
        return "is empty"
    if relative.startswith("/"):
        return "is absolute"
    if _REFUSED_CHARACTER.search(relative):
        # A backslash separates folders on Windows and for some filesystems under fsspec, where one may climb.
        return "has a backslash, a control character or half a surrogate pair"
    if _SCHEME.match(relative):
        return "has a URL scheme"
    if ".." in relative.split("/"):
        return "climbs out of the checkpoint"
    return None
