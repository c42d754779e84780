"""State that differs between ranks: keyed by rank so that all of it is saved, and noticed where it is not.

DCP saves one rank's value under each name. A dataloader's position or a random generator's state, which every rank has
under the same name, is then one rank's for all.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.dcp.plan_columns import BYTE_IO, TENSOR, Table
from bucketpoint.errors import BucketpointError

DIGEST_BYTES = 4

_UNKNOWN = bytes(DIGEST_BYTES)
_MAX_BYTES = 64 << 10
"""Of a value are looked at; random generators' states are 5 kB."""

_MAX_NODES = 20_000
"""Values within values that are looked at in all, which takes some 20 ms."""

_RANK = re.compile(r"\.rank-(0|[1-9][0-9]{0,8})(?:\.|$)")


def rank_state(value: Any, rank: int | None = None) -> dict[str, Any]:
    """A value of this rank's own, to be put into the state under a name that other ranks use too.

    Args:
        value: what a state dict may hold.
        rank: whose it is; this process's by default.

    Returns:
        `{"rank-3": value}` on rank 3.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank < 0:
        raise BucketpointError(f"There is no rank {rank}")
    return {f"rank-{rank}": value}


def saved_ranks(metadata: Metadata, name: str) -> list[int]:
    """The ranks that saved a value by `rank_state` under a name, such as `"loader"` or `"train.loader"`, ascending."""
    found = (_RANK.match(fqn, len(name)) for fqn in metadata.state_dict_metadata if fqn.startswith(f"{name}.rank-"))
    return sorted({int(match[1]) for match in found if match is not None})


def rank_state_name(fqn: str) -> str | None:
    """The name under which `rank_state` put what has this key, such as `"loader"` for `"loader.rank-3.position"`."""
    match = _RANK.search(fqn)
    return fqn[: match.start()] if match is not None else None


def value_digests(items: Iterable[WriteItem], state: Mapping[str, Any]) -> bytes:
    """4 bytes for each item that may be a rank's own, in their order: see `differing`. Zeros say nothing."""
    budget = [_MAX_NODES]
    return b"".join(_digest(state.get(item.index.fqn), budget) for item in items if _may_be_own(item))


def differing(names: Sequence[tuple[str, ...]], digests: Sequence[bytes]) -> list[str]:
    """Names under which ranks hold different values, sorted.

    Args:
        names: for each rank, of the items that may be its own, in their order.
        digests: what `value_digests` made of them.
    """
    seen: dict[str, set[bytes]] = defaultdict(set)
    # Most ranks say the same.
    for mine, said in dict.fromkeys(zip(names, digests, strict=True)):
        if len(said) != DIGEST_BYTES * len(mine):
            continue
        for at, name in enumerate(mine):
            seen[name].add(said[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)])
    return sorted(name for name, found in seen.items() if len(found - {_UNKNOWN}) > 1)


def own_names(items: Iterable[WriteItem]) -> tuple[str, ...]:
    """Names of the items that may be a rank's own, in their order."""
    return tuple([item.index.fqn for item in items if _may_be_own(item)])


def own_names_of(table: Table) -> tuple[str, ...]:
    """The same of a table of items."""
    own = [_is_generator_state(size, properties) for properties, size in table.descriptions]
    rows = zip(table.names, table.kinds, table.described, strict=True)
    return tuple([name for name, kind, at in rows if kind == BYTE_IO or (kind == TENSOR and own[at])])


def _may_be_own(item: WriteItem) -> bool:
    """No tensor; or a vector of bytes, as random generators' states are. Weights of replicas are compared by nobody."""
    if item.type == WriteItemType.BYTE_IO:
        return True
    data = item.tensor_data
    return item.type == WriteItemType.TENSOR and data is not None and _is_generator_state(data.size, data.properties)


def _is_generator_state(size: Sequence[int], properties: Any) -> bool:
    return len(size) == 1 and properties.dtype is torch.uint8 and int(size[0]) <= _MAX_BYTES


def _digest(value: Any, budget: list[int]) -> bytes:
    said = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        _describe(value, said.update, budget)
    except (_UnknownError, RecursionError):
        return _UNKNOWN
    return said.digest()


class _UnknownError(Exception):
    """Nothing can be said of a value: of a class that is not known here, or too large."""


def _describe(value: Any, say: Any, budget: list[int]) -> None:
    """Equal values say the same on all ranks, which their pickles do not."""
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
        # Their order is not the same in each process.
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
