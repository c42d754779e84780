"""Process groups of our own: what ranks tell each other for a checkpoint never meets the collectives of training.

Two threads that use one process group at once send on the same connections. Where the order differs between ranks, they
wait for each other forever, or one reads the other's bytes, on which gloo ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from bucketpoint.errors import BucketpointError

logger = logging.getLogger(__name__)

_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By the caller's group, the group of our own over the same ranks on which saves in the background run."""


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group; None stands for all ranks of the job, or for this process alone.

    Raises:
        BucketpointError: this rank is not among them.
    """
    if not is_initialized():
        return (0,)
    ranks = tuple(range(dist.get_world_size())) if group is None else tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise BucketpointError(
            f"Rank {dist.get_rank()} is not in the process group that was given",
            remedy="Pass each rank a group that it is in, or make the call on the group's ranks alone",
        )
    return ranks


def refuse_a_rank_alone(what: str, url: str | None = None) -> None:
    """Check that a job of several ranks has the process group that joins them.

    Raises:
        BucketpointError: torchrun says that there are several, and each of them would work by itself.
    """
    world = _ranks_without_a_group()
    if world > 1:
        raise BucketpointError(
            f"{what} cannot begin: this is rank {os.environ.get('RANK', '?')} of {world} ranks, as WORLD_SIZE says, "
            "and there is no process group, so that each rank would work by itself",
            url=url,
            remedy="Call torch.distributed.init_process_group() first, on every rank; a process that works alone "
            "unsets WORLD_SIZE",
        )


def refuse_to_save_as_one_of_many(url: str | None) -> None:
    """Check that a rank which DCP takes for the only one is not one of several without a process group.

    Rank 0 may mean to save alone, with `no_dist=True`, which a writer cannot tell. The others would replace what it
    saves.

    Raises:
        BucketpointError: this is another rank than 0.
    """
    rank, world = os.environ.get("RANK", "0"), _ranks_without_a_group()
    if rank != "0" and world > 1:
        raise BucketpointError(
            f"This is rank {rank} of {world} ranks, as RANK and WORLD_SIZE say, and there is no process group: each "
            "rank would save by itself, and replace what the others save",
            url=url,
            rank=int(rank) if rank.isdigit() else None,
            remedy="Call torch.distributed.init_process_group() first, on every rank; a rank that saves something of "
            "its own passes no_dist=True after that",
        )


def _ranks_without_a_group() -> int:
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() and not is_initialized() else 1


def timeout_of(group: Any) -> timedelta:
    """How long the ranks of a group wait for each other. There is no public way to ask."""
    pg: Any = group if group is not None else dist.group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            found = pg._get_backend(torch.device(device)).options._timeout
            if isinstance(found, timedelta):
                return found
    return default_pg_timeout


def store_of(ranks: tuple[int, ...]) -> Any:
    """The part of the job's store that belongs to these ranks."""
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.PrefixStore(f"bucketpoint/{_digest(ranks)}", _get_default_store())


def connect(ranks: tuple[int, ...], store: Any, name: str, timeout: timedelta) -> Any:
    """Make a gloo group of these ranks. A collective call of theirs, and of no other rank's.

    Not `dist.new_group`: all ranks of the job have to call that one, its names repeat after a failure, and they differ
    between ranks that are in different numbers of groups.

    Args:
        store: of this group alone.
        name: the same on all ranks, and another one for each group of the same ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    make: Any = c10d._new_process_group_helper
    group, _ = make(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend("gloo"),
        store,
        f"bucketpoint-{_digest(ranks)}-{name}",
        timeout=timeout,
        group_desc="bucketpoint",
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _digest(ranks: tuple[int, ...]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def new_group(parent: Any, timeout: timedelta | None = None) -> Any:
    """Make a gloo group of the ranks of another group; None stands for all ranks. A collective call of these ranks.

    Args:
        timeout: how long ranks wait for each other in one collective; by default as long as in `parent`.
    """
    ranks = ranks_of(parent)
    store = store_of(ranks)
    # Counted by each rank in the store: a process that was replaced goes on where the one before it was.
    name = f"kept-{store.add(f'groups/{ranks.index(dist.get_rank())}', 1)}"
    return connect(ranks, dist.PrefixStore(name, store), name, timeout if timeout is not None else timeout_of(parent))


def group_beside(parent: Any) -> Any:
    """The gloo group, made once and kept, on which saves in the background run instead of `parent`.

    The first call for a group is a collective one. None where there is no process group.
    """
    if not is_initialized():
        return None
    world: Any = dist.group.WORLD
    beside = parent if parent is not None else world
    own = _beside.get(beside)
    if own is None or not _is_known(own):
        own = _beside[beside] = new_group(parent)
        weakref.finalize(beside, leave, own).atexit = False
    return own


def leave(group: Any) -> None:
    """Give back the connections and threads of a group. Not a collective call."""
    if is_initialized() and _is_known(group):
        dist.destroy_process_group(group)


def _is_known(group: Any) -> bool:
    """True until the group, or all groups with it, were destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def warn_of_a_shared_group() -> None:
    """Say once that a save in the background runs on the default group, where there is no other that it could run on.

    DCP does not tell a writer which group it is. The checkpoint process has a default group that it shares with nobody,
    and saves on its main thread.
    """
    if len(dist.distributed_c10d._world.pg_map) == 1 and threading.current_thread() is not threading.main_thread():
        _warn()


@functools.cache
def _warn() -> None:
    logger.warning(
        "saves run beside training on the default process group: where collectives of training on that group meet "
        "those of a save, the job hangs or is aborted. Call bucketpoint.async_save, which makes a group of its own, or "
        'pass process_group=dist.new_group(backend="gloo"), made once on every rank'
    )
