"""State that differs between ranks: a key for each rank, so that all values are saved, and checks for lost values.

DCP saves one rank's value under each name. Every rank has the position of a dataloader, or the state of a random
generator, under the same name: without a key for each rank, the value of one rank is saved for all.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import itertools
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.dcp.planning.balance import MIN_SLICE_BYTES
from bucketpoint.dcp.planning.items import SHARD, Table, packed_items
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.coverage import RANK
from bucketpoint.format.tensor_bytes import copy_stretch, is_viewable

DIGEST_BYTES = 4

_UNKNOWN = bytes(DIGEST_BYTES)
_MAX_BYTES = 64 << 10
"""Limit on the compared bytes of a value; the state of a random generator has 5 kB."""

_MAX_NODES = 20_000
"""Limit on the compared nested values, over all items: takes about 20 ms."""

_SAMPLE_BYTES = 2
_COMPARED_BYTES = 512
"""Bytes that are compared at the beginning, in the middle and at the end of each replica of a tensor."""


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


def compared_digests(items: Iterable[WriteItem], state: Mapping[str, Any]) -> bytes:
    """Return 4 bytes for each value and then 2 for each replica that `_compared` names. Zeros: not comparable.

    A replica takes some 4 us in host memory, and a copy of 512 bytes on a device.
    """
    budget = [_MAX_NODES]
    values, replicas = _compared(_rows(items))
    digests = [_digest(state.get(name), budget) for name in values]
    # After the values: a coordinator of an older version then compares neither.
    return b"".join(digests + [_sample(state.get(name)) for name in replicas])


_Row: TypeAlias = tuple[str, bool, tuple[TensorProperties, torch.Size] | None]
"""Name of an item, True unless it is a shard, and properties and size of the tensor; None for bytes."""


def _rows(items: Iterable[WriteItem]) -> list[_Row]:
    every = [(item, item.tensor_data) for item in items]
    return [
        (item.index.fqn, item.type != WriteItemType.SHARD, None if data is None else (data.properties, data.size))
        for item, data in every
    ]


def _rows_of_table(table: Table) -> list[_Row]:
    described = [None if at < 0 else table.descriptions[at] for at in table.described]
    return [(name, kind != SHARD, about) for name, kind, about in zip(table.names, table.kinds, described, strict=True)]


def _compared(rows: Iterable[_Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the items that are compared with those of other ranks, in order.

    First those that may rightly differ between ranks, and of which one rank's value is saved: objects, and vectors of
    bytes, such as the state of a random generator. Then replicas that may be cut, so that several ranks save parts of
    them. Smaller ones are saved by one rank, as DCP does, and may differ rightly: running statistics of BatchNorm do.
    """
    values, replicas = [], []
    for name, whole, about in rows:
        if about is None:
            values.append(name)
        elif whole:
            properties, size = about
            if len(size) == 1 and properties.dtype is torch.uint8 and int(size[0]) <= _MAX_BYTES:
                values.append(name)
            elif size.numel() * int(properties.dtype.itemsize) > MIN_SLICE_BYTES:
                replicas.append(name)
    return tuple(values), tuple(replicas)


def differences(
    plans: Sequence[SavePlan], tables: Mapping[bytes, Table], digests: Sequence[bytes]
) -> tuple[list[str], list[str]]:
    """Return the names of the values that differ between ranks, and of the tensors of one shape that do, sorted.

    Args:
        tables: of all ranks, decoded.
        digests: for each rank, the result of `compared_digests`; of another length if it sent none.
    """
    of_table = {blob: _compared(_rows_of_table(table)) for blob, table in tables.items()}
    values, replicas = [], []
    for plan, joined in zip(plans, digests, strict=True):
        packed = packed_items(plan.items)
        parts = [_compared(_rows(plan.items))] if packed is None else [of_table[blob] for blob in packed.tables]
        named, cut = (tuple(itertools.chain.from_iterable(part[at] for part in parts)) for at in range(2))
        border = DIGEST_BYTES * len(named)
        values.append((named, joined[:border]))
        replicas.append((cut, joined[border:]))
    return _differing(values), _differing(replicas)


def _differing(sent: Sequence[tuple[tuple[str, ...], bytes]]) -> list[str]:
    """Return the names that have more than one digest, of those that are not zeros."""
    seen: dict[str, set[bytes]] = defaultdict(set)
    # Each distinct pair once, as most ranks send the same.
    for mine, joined in dict.fromkeys(sent):
        width = len(joined) // max(len(mine), 1)
        if width and len(joined) == width * len(mine):
            for at, name in enumerate(mine):
                digest = joined[width * at : width * (at + 1)]
                if any(digest):
                    seen[name].add(digest)
    return sorted(name for name, found in seen.items() if len(found) > 1)


def _sample(value: Any) -> bytes:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return bytes(_SAMPLE_BYTES)
    nbytes = value.numel() * value.element_size()
    if is_viewable(value):
        # Few bytes are copied, because a view of the whole tensor takes longer to make.
        begin, crc = value.data_ptr(), 0
        for start in (0, nbytes // 2, nbytes - _COMPARED_BYTES):
            crc = zlib.crc32(ctypes.string_at(begin + start, _COMPARED_BYTES), crc)
    else:
        piece = bytearray(_COMPARED_BYTES)
        copy_stretch(value, nbytes // 2, memoryview(piece))
        crc = zlib.crc32(piece)
    return (crc % 0xFFFF + 1).to_bytes(_SAMPLE_BYTES, "big")


def _digest(value: Any, budget: list[int]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        _describe(value, digest.update, budget)
    except Exception:  # noqa: BLE001 (the comparison only warns: no value that it cannot describe may fail the save)
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
