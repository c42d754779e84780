"""Object keys within a checkpoint's prefix: naming, joining and parsing."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
import zlib

from bucketpoint.errors import UnsafeDataError
from bucketpoint.format.catalog_keys import CATALOG

METADATA = ".metadata"
"""Key of the commit: DCP's own name of its metadata, so that stock readers find it."""

RECORD = ".bucketpoint.json"
"""Key of the commit record, which only repeats facts of the metadata."""

DATA_FOLDER = "data"

FENCE_FOLDER = f"{CATALOG}/fences"
"""Folder of a checkpoint's fences, which its trainers and pruners write and delete."""

FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""File endings of other formats: torch.save and safetensors."""

_TOKEN_BYTES = 6
_GROUP = re.compile(r"[A-Za-z0-9_.]+")
_DATA_PATH = re.compile(
    r"data/(?P<entropy>[0-9a-f]{2})/(?P<token>[0-9a-f]{12})-(?P<rank>0|[1-9][0-9]*)"
    r"-(?P<group>[A-Za-z0-9_.]+)-(?P<n>0|[1-9][0-9]*)\.distcp",
    re.ASCII,
)
_DATA_PATH_BYTES = re.compile(rb"data/[0-9a-f]{2}/([0-9a-f]{12})-[0-9]{1,9}-[A-Za-z0-9_.]+-[0-9]{1,9}\.distcp")
_TOKEN = re.compile(r"[0-9a-f]{12}", re.ASCII)
_FENCE_PATH = re.compile(CATALOG + r"/fences/(?P<token>[0-9a-f]{12})", re.ASCII)
_RANK_METADATA = re.compile(r"__(0|[1-9][0-9]{0,8})\.metadata", re.ASCII)
_REFUSED_CHARACTER = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\\]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:", re.ASCII)


def rank_metadata(rank: int) -> str:
    """Return the path of the metadata of one rank, for a save that ran without collectives."""
    if rank < 0:
        raise ValueError(f"rank {rank} is negative")
    return f"__{rank}{METADATA}"


def is_rank_metadata(path: str) -> bool:
    """Return True if `rank_metadata` makes this path for some rank."""
    return _RANK_METADATA.fullmatch(path) is not None


def fence_path(token: str) -> str:
    """Return the path of an attempt's fence, the object that decides whether the attempt commits or is swept."""
    return f"{FENCE_FOLDER}/{token}"


def parse_fence_path(path: str) -> str | None:
    """Return the token in a path that `fence_path` made, or None for any other path."""
    match = _FENCE_PATH.fullmatch(path)
    return match["token"] if match is not None else None


def new_token() -> str:
    """Draw a unique random token, such as for one rank of an attempt to save."""
    # `random` would draw the same token on every rank and in every run of a training job that sets the seed.
    return os.urandom(_TOKEN_BYTES).hex()


def is_token(text: str) -> bool:
    """Return True if the text has the form of a token that `new_token` made."""
    return _TOKEN.fullmatch(text) is not None


def save_id(token: str) -> str:
    """Return the `save_id` of an attempt in DCP's metadata: a UUID that ends in the token."""
    drawn = uuid.UUID(bytes=hashlib.blake2b(token.encode(), digest_size=16).digest(), version=4)
    return f"{str(drawn)[:-12]}{token}"


def data_path(token: str, rank: int, group: str, n: int) -> str:
    """Return the path of data object `n` of a rank and an object group.

    The folder spreads the objects of one checkpoint over the store's partitions. It does not depend on the token, so
    partitions that the store has split under one save's load also serve the next save at the same URL.
    """
    if not _GROUP.fullmatch(group):
        raise ValueError(f"object group {group!r} must consist of letters, digits, underscores and dots")
    return f"{DATA_FOLDER}/{_entropy(rank, group, n)}/{token}-{rank}-{group}-{n}.distcp"


def parse_data_path(path: str) -> tuple[str, int, str, int] | None:
    """Return the (token, rank, group, n) of a path that `data_path` made, or None for any other path."""
    match = _DATA_PATH.fullmatch(path)
    # A hostile listing may have names with very many digits, for which int() takes quadratic time.
    if match is None or len(path) > 1024:
        return None
    rank, group, n = int(match["rank"]), match["group"], int(match["n"])
    if match["entropy"] != _entropy(rank, group, n):
        return None
    return match["token"], rank, group, n


def tokens_in(data: bytes) -> set[str]:
    """Return the tokens, one per rank, of all data paths in `data`, such as the bytes of a `.metadata`."""
    return {match[1].decode() for match in _DATA_PATH_BYTES.finditer(data)}


def token_of(path: str) -> str | None:
    """Return the token in a data path, or None for any other path."""
    named = parse_data_path(path)
    return named[0] if named is not None else None


def join(prefix: str, relative: str) -> str:
    """Return the key of `relative` below `prefix`, which is empty or has no trailing slash.

    Raises:
        UnsafeDataError: `relative`, which may come from untrusted metadata, would leave the prefix.
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
    """Return True if an object that the metadata names as data may be deleted with the checkpoint.

    False for commits, records and objects of a catalog, which hostile metadata may name.
    """
    parts = path.casefold().split("/")
    return not any(part.endswith(METADATA) or part in (RECORD, CATALOG) for part in parts)


def _entropy(rank: int, group: str, n: int) -> str:
    return f"{zlib.crc32(f'{rank}/{group}/{n}'.encode()) & 0xFF:02x}"


def _unsafe(relative: str) -> str | None:
    if not relative:
        return "is empty"
    if relative.startswith("/"):
        return "is absolute"
    if _REFUSED_CHARACTER.search(relative):
        # A backslash separates folders on Windows and some fsspec filesystems: `..\` would leave the prefix there.
        return "has a backslash, a control character or half a surrogate pair"
    if _SCHEME.match(relative):
        return "has a URL scheme"
    if ".." in relative.split("/"):
        return "climbs out of the checkpoint"
    return None
