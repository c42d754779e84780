"""State that differs between ranks: a key for each rank, so that all values are saved, and a check for lost values.

DCP saves one rank's value under each name. Every rank has the position of a dataloader, or the state of a random
generator, under the same name: without a key for each rank, the value of one rank is saved for all.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.dcp.planning.columnar.encoding import BYTE_IO, TENSOR, Table
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.coverage import RANK

DIGEST_BYTES = 4

_UNKNOWN = bytes(DIGEST_BYTES)
_MAX_BYTES = 64 << 10
"""Bytes of a value that are compared at most; the state of a random generator has 5 kB."""

_MAX_NODES = 20_000
"""Nested values that are compared at most, over all items: takes about 20 ms."""


def rank_state(value: Any, rank: int | None = None) -> dict[str, Any]:
    """Wrap a value that belongs to this rank, so that other ranks can save theirs under the same name.

    Args:
        value: anything that a state dict may hold.
        rank: the rank to which the value belongs; by default the rank of this process.

    Returns:
        `{"rank-3": value}` on rank 3.

    Raises:
        BucketpointError: `rank` is negative.
    """
    if rank is None:
        rank = this_rank()
    if rank < 0:
        raise BucketpointError(f"There is no rank {rank}")
    return {f"rank-{rank}": value}


def saved_ranks(metadata: Metadata, name: str) -> list[int]:
    """Return the ranks, ascending, that saved a value by `rank_state` under a name.

    Args:
        metadata: metadata of the checkpoint, as a reader's `read_metadata` returns it.
        name: name of the value in the state, such as `"train.loader"`.
    """
    matches = (RANK.match(fqn, len(name)) for fqn in metadata.state_dict_metadata if fqn.startswith(f"{name}.rank-"))
    return sorted({int(match[1]) for match in matches if match is not None})


def rank_state_name(fqn: str) -> str | None:
    """Return the name under which `rank_state` was used for this key: `"loader"` for `"loader.rank-3.position"`.

    None if the key has no part of `rank_state`.
    """
    match = RANK.search(fqn)
    return fqn[: match.start()] if match is not None else None


def value_digests(items: Iterable[WriteItem], state: Mapping[str, Any]) -> bytes:
    """Return 4 bytes for each item that may differ between ranks, in order: see `differing`. Zeros: not comparable."""
    budget = [_MAX_NODES]
    return b"".join(_digest(state.get(item.index.fqn), budget) for item in items if _may_be_own(item))


def differing(names: Sequence[tuple[str, ...]], digests: Sequence[bytes]) -> list[str]:
    """Return the names under which ranks hold different values, sorted.

    Args:
        names: for each rank, the names of the items that may differ between ranks, in order.
        digests: for each rank, the result of `value_digests` for these items.
    """
    seen: dict[str, set[bytes]] = defaultdict(set)
    # Each distinct pair once, as most ranks send the same.
    for mine, joined in dict.fromkeys(zip(names, digests, strict=True)):
        if len(joined) == DIGEST_BYTES * len(mine):
            for at, name in enumerate(mine):
                seen[name].add(joined[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)])
    return sorted(name for name, values in seen.items() if len(values - {_UNKNOWN}) > 1)


def own_names(items: Iterable[WriteItem]) -> tuple[str, ...]:
    """Return the names of the items that may differ between ranks, in order."""
    return tuple([item.index.fqn for item in items if _may_be_own(item)])


def own_names_of(table: Table) -> tuple[str, ...]:
    """Return the names of the items of a table that may differ between ranks, in order."""
    own = [_is_generator_state(size, properties) for properties, size in table.descriptions]
    rows = zip(table.names, table.kinds, table.described, strict=True)
    return tuple([name for name, kind, at in rows if kind == BYTE_IO or (kind == TENSOR and own[at])])


def _may_be_own(item: WriteItem) -> bool:
    """Return True if an item is no tensor, or is a vector of bytes, such as the state of a random generator.

    Other tensors, such as the weights of replicas, are not compared.
    """
    if item.type == WriteItemType.BYTE_IO:
        return True
    data = item.tensor_data
    return item.type == WriteItemType.TENSOR and data is not None and _is_generator_state(data.size, data.properties)


def _is_generator_state(size: Sequence[int], properties: Any) -> bool:
    return len(size) == 1 and properties.dtype is torch.uint8 and int(size[0]) <= _MAX_BYTES


def _digest(value: Any, budget: list[int]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        _describe(value, digest.update, budget)
    except (_UnknownError, RecursionError):
        return _UNKNOWN
    return digest.digest()


class _UnknownError(Exception):
    """Raised for a value that cannot be compared: of an unknown class, or too large."""


def _describe(value: Any, say: Any, budget: list[int]) -> None:
    """Feed a description of a value to `say`. Equal values give the same bytes on all ranks; their pickles may not."""
    budget[0] -= 1
    if budget[0] < 0:
        raise _UnknownError
    kind = type(value)
    say(kind.__qualname__.encode())
    if kind is str:
        say(b"%d:" % len(value) + value[:_MAX_BYTES].encode("utf-8", "surrogatepass"))
    elif isinstance(value, enum.Enum):
        say(value.name.encode())
    elif kind is int:
        say(b"%x:" % value)
    elif kind in (bool, type(None), torch.dtype, torch.device):
        say(repr(value).encode())
    elif kind is float:
        say(struct.pack("<d", value))
    elif kind in (bytes, bytearray):
        say(b"%d:" % len(value) + bytes(value[:_MAX_BYTES]))
    elif kind in (list, tuple):
        say(b"%d" % len(value))
        for each in value:
            _describe(each, say, budget)
    elif kind in (set, frozenset) or isinstance(value, dict):
        parts = []
        for each in value.items() if isinstance(value, dict) else value:
            part = hashlib.blake2b(digest_size=8)
            _describe(each, part.update, budget)
            parts.append(part.digest())
        # Sorted, as the order of a set, or of a dict, may differ between processes.
        say(b"".join(sorted(parts)))
    elif kind is torch.Tensor:
        if value.device.type != "cpu" or not value.is_contiguous() or value.nbytes > _MAX_BYTES:
            raise _UnknownError
        say(f"{value.dtype}{tuple(value.shape)}".encode())
        say(bytes(value.detach().reshape(-1).view(torch.uint8).tolist()))
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not getattr(value.dtype, "hasobject", True):
        if value.nbytes > _MAX_BYTES:
            raise _UnknownError
        say(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    else:
        raise _UnknownError
