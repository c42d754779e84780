"""State that differs between ranks: a separate key for each rank, and detection of values that would be lost.

DCP saves one rank's value under each name. If all ranks keep the position of a dataloader, or the state of a random
generator, under the same name, the values of all ranks but one are lost.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from bucketpoint.dcp.planning.items import MIN_SLICE_BYTES, SHARD, Table, packed_items
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.coverage import RANK
from bucketpoint.format.tensor_bytes import copy_stretch, is_viewable, refuse_freed

DIGEST_BYTES = 4

_UNKNOWN = bytes(DIGEST_BYTES)
_MAX_BYTES = 64 << 10
"""Limit on the bytes of a value that is compared; the state of a random generator has 5 kB."""

_MAX_NODES = 20_000
"""Limit on the nested values that are compared, over all items: about 20 ms."""

_SAMPLE_BYTES = 2
_COMPARED_BYTES = 512
"""Bytes compared at the beginning, in the middle and at the end of each replica; on a device, only in the middle."""


def rank_state(value: Any, rank: int | None = None) -> dict[str, Any]:
    """Wrap a value of this rank, so that the ranks can save different values under the same name.

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
    """Return the ranks that saved a value under `name` with `rank_state`, in ascending order.

    Args:
        metadata: metadata of the checkpoint, as a reader's `read_metadata` returns it.
        name: name of the value in the state, such as `"train.loader"`.
    """
    matches = (RANK.match(fqn, len(name)) for fqn in metadata.state_dict_metadata if fqn.startswith(f"{name}.rank-"))
    return sorted({int(match[1]) for match in matches if match is not None})


def rank_state_name(fqn: str) -> str | None:
    """Return the name under which `rank_state` was used for this key: `"loader"` for `"loader.rank-3.position"`.

    None if the key does not come from `rank_state`.
    """
    match = RANK.search(fqn)
    return fqn[: match.start()] if match is not None else None


def compared_digests(items: Iterable[WriteItem], state: Mapping[str, Any]) -> bytes:
    """Return a 4-byte digest for each value, then a 2-byte digest for each replica; zeros for incomparable values.

    A replica takes about 4 us in host memory, and a copy of 512 bytes on a device.
    """
    budget = [_MAX_NODES]
    values, replicas = _compared(_rows(items))
    digests = [_digest(state.get(name), budget) for name in values]
    # An older coordinator does not expect digests of replicas; due to their length it then compares nothing.
    return b"".join(digests + [_sample(name, state.get(name)) for name in replicas])


_Row: TypeAlias = tuple[str, bool, tuple[TensorProperties, torch.Size] | None]
"""Name of an item; True unless it is a shard; properties and size of the tensor, or None for bytes."""


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
    """Return the names of the values, and of the replicas, that are compared with those of other ranks.

    Values are objects and vectors of bytes, such as the state of a random generator: only one rank's value is saved.
    Replicas are tensors large enough to be cut, of which several ranks save parts. Smaller tensors are not compared:
    one rank saves them, and they may differ legitimately, as running statistics of BatchNorm do.
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
    """Return the sorted names of the values, and of the replicas, that differ between ranks.

    Args:
        tables: decoded tables of all ranks.
        digests: for each rank, the result of `compared_digests`; ignored if its length is unexpected.
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
    """Return the names that have more than one digest, zeros not counted."""
    seen: dict[str, set[bytes]] = defaultdict(set)
    # Most ranks send the same pair, which is processed only once.
    for mine, joined in dict.fromkeys(sent):
        width = len(joined) // max(len(mine), 1)
        if width and len(joined) == width * len(mine):
            for at, name in enumerate(mine):
                digest = joined[width * at : width * (at + 1)]
                if any(digest):
                    seen[name].add(digest)
    return sorted(name for name, found in seen.items() if len(found) > 1)


def _sample(name: str, value: Any) -> bytes:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return bytes(_SAMPLE_BYTES)
    refuse_freed(value, name)
    nbytes = value.numel() * value.element_size()
    if is_viewable(value):
        # Copying a few bytes is faster than making a view of the whole tensor.
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
    except Exception:  # noqa: BLE001 (the comparison only warns: a value that it cannot describe must not fail the save)
        return _UNKNOWN
    return digest.digest()


class _UnknownError(Exception):
    """Raised for a value that cannot be compared: of an unknown class, or too large."""


def _describe(value: Any, say: Any, budget: list[int]) -> None:
    """Pass a description of a value to `say`. Unlike pickles, it has the same bytes on all ranks for equal values."""
    budget[0] -= 1
    if budget[0] < 0:
        raise _UnknownError
    kind = type(value)
    say(kind.__qualname__.encode())
    if kind in (str, bytes, bytearray):
        say(f"{len(value)}:{value[:_MAX_BYTES]!r}".encode("utf-8", "surrogatepass"))
    elif isinstance(value, enum.Enum):
        say(value.name.encode())
    elif kind is int:
        say(b"%x:" % value)
    elif kind in (float, bool, type(None), torch.dtype, torch.device):
        say(f"{value!r}:".encode())
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
        # The order of a set or a dict may differ between processes.
        say(b"".join(sorted(parts)))
    elif kind is torch.Tensor:
        if value.device.type != "cpu" or not value.is_contiguous() or value.nbytes > _MAX_BYTES:
            raise _UnknownError
        refuse_freed(value)
        say(f"{value.dtype}{tuple(value.shape)}".encode())
        say(bytes(value.detach().reshape(-1).view(torch.uint8).tolist()))
    elif kind.__module__ == "numpy" and hasattr(value, "tobytes") and not getattr(value.dtype, "hasobject", True):
        if value.nbytes > _MAX_BYTES:
            raise _UnknownError
        say(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    else:
        raise _UnknownError
