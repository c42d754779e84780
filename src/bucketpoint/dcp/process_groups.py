"""Separate process groups for checkpoints, so that their collectives never mix with those of training.

Two threads that use one process group at the same time share its connections. If the order of their calls
differs between ranks, they wait for each other forever, or one reads the other's bytes and gloo ends the process."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from bucketpoint.errors import BucketpointError, RanksDisagreeError
from bucketpoint.staging import SavingRanks

_UNUSED_TAG = 1 << 30
_AT_ONCE = timedelta(milliseconds=1)

MOST_CONNECTED = 256
"""Largest group in which every rank is connected with every other rank. 256 ranks fetch 150 MB of addresses from the
job's TCP store, and 2,000 ranks would fetch 65 GB."""

_LAZY = "bucketpoint_lazy_gloo"
_SPARE_DESCRIPTORS = 64


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """Return the global rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks in this job, for saves and loads without collectives too."""
    return dist.get_world_size() if is_initialized() else 1


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group. None means all ranks of the job, or this process alone.

    Raises:
        BucketpointError: this rank is not in the group.
    """
    if not is_initialized():
        return (0,)
    ranks = tuple(range(dist.get_world_size())) if group is None else tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise BucketpointError(
            f"Rank {dist.get_rank()} is not in the process group that was passed",
            remedy="Pass each rank a group that it is in, or make the call only on the ranks of the group",
        )
    return ranks


def refuse_a_rank_alone(what: str, url: str | None = None, *, first_may: bool = False) -> None:
    """Check that a job of several ranks has a process group.

    Without a group, DCP treats each rank as the only rank, and the ranks would replace each other's checkpoint.

    Args:
        first_may: accept rank 0, which may save alone on purpose (`no_dist=True`); a writer cannot detect this.

    Raises:
        BucketpointError: WORLD_SIZE, which torchrun sets, is above 1, and there is no process group.
    """
    world, rank = ranks_expected(), os.environ.get("RANK", "0" if first_may else "?")
    if world <= 1 or (first_may and rank == "0"):
        return
    alone = "a rank that then saves a separate checkpoint passes no_dist=True"
    raise BucketpointError(
        f"{what} cannot begin: this is rank {rank} of {world} ranks (by RANK and WORLD_SIZE), but there is no process "
        "group, so each rank would work alone",
        url=url,
        rank=int(rank) if rank.isdigit() else None,
        remedy="Call torch.distributed.init_process_group() first, on every rank; "
        + (alone if first_may else "a process that works alone must unset WORLD_SIZE"),
    )


def refuse_other_ranks(ranks: SavingRanks, url: str | None = None) -> None:
    """Check that the process group has as many ranks as when the state was staged.

    Without a group, DCP treats each rank as the only rank, which would commit its part of the state as the whole.

    Raises:
        RanksDisagreeError: the group is gone, or has another number of ranks.
    """
    now = world_size()
    if ranks.job in (None, now):
        return
    there = f"the process group has {now} ranks" if is_initialized() else "there is no process group"
    raise group_gone(f"The state was staged by one of {ranks.job} ranks, but now {there}. Nothing was saved", url)


def group_gone(why: str, url: str | None) -> RanksDisagreeError:
    return RanksDisagreeError(
        why,
        url=url,
        remedy="Wait for the save (its handle's result(), or the manager's close()) before "
        "torch.distributed.destroy_process_group(). A rank that saves its part alone passes no_dist=True to "
        "bucketpoint.async_save",
    )


def ranks_expected() -> int:
    """Return WORLD_SIZE if there is no process group; else 1."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() and not is_initialized() else 1


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the collectives of a group, for which torch has no public function."""
    pg: Any = group if group is not None else dist.group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            timeout = pg._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return default_pg_timeout


def store_of(ranks: tuple[int, ...]) -> Any:
    """Return the part of the job's TCP store that only meetings of these ranks use."""
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.PrefixStore(f"bucketpoint/{digest_of(ranks)}", _get_default_store())


def connect(ranks: tuple[int, ...], store: Any, name: str, timeout: timedelta) -> Any:
    """Make a gloo group of these ranks. A collective call of exactly these ranks.

    `dist.new_group` is not suitable: all ranks of the job must call it, its group names repeat after a failure, and
    they differ between ranks that are in different numbers of groups.

    In groups of more than `MOST_CONNECTED` ranks, only the ranks that communicate in a collective are connected: the
    first rank with all others, and any other rank with about log2(ranks) others.

    Args:
        store: a store that only this group uses.
        name: the same on all ranks, and unique among the groups of the same ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    make: Any = c10d._new_process_group_helper
    lazy = len(ranks) > MOST_CONNECTED
    if lazy and not hasattr(dist.Backend, _LAZY.upper()):
        dist.Backend.register_backend(_LAZY, _lazy_gloo, devices=["cpu"])
    group, _ = make(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        c10d.Backend(_LAZY if lazy else "gloo"),
        store,
        f"bucketpoint-{digest_of(ranks)}-{name}",
        timeout=timeout,
        group_desc="bucketpoint",
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    if lazy:
        _connect_neighbours(backend_of(group))
    return group


def too_few_descriptors(ranks: tuple[int, ...]) -> BucketpointError | None:
    """Return an error if this process cannot open the connections that `connect` opens.

    gloo ends the process if it cannot open a connection. Callers check before the ranks meet, so that no rank waits for
    a rank that cannot connect.
    """
    connections = 1 if len(ranks) > MOST_CONNECTED and ranks[0] != dist.get_rank() else len(ranks)
    with contextlib.suppress(ImportError, OSError):
        import resource

        limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
        if limit != resource.RLIM_INFINITY and used + connections + _SPARE_DESCRIPTORS > limit:
            return BucketpointError(
                f"Rank {dist.get_rank()} cannot connect with {len(ranks)} ranks: it may open {limit} files, of which "
                f"{used} are open",
                rank=dist.get_rank(),
                remedy=f"Raise the limit before the job starts: ulimit -n {max(4096, 3 * len(ranks) + 1000)}",
            )
    return None


def _lazy_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a gloo backend in which two ranks connect when one of them first sends to the other."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # Select the devices as gloo's constructor does.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in names] or [
        gloo.create_default_device(lazy_init=True)
    ]
    return gloo(store, rank, size, options)


def _connect_neighbours(backend: Any) -> None:
    """Run once each collective that DCP uses, so that ranks later notice the closed connections of a lost rank."""
    own = torch.zeros(1, dtype=torch.uint8, device="cpu")
    every = [torch.empty_like(own) for _ in range(backend.size())]
    to_first, from_first = dist.GatherOptions(), dist.BroadcastOptions()
    to_first.rootRank = from_first.rootRank = from_first.rootTensor = 0
    backend.allgather([every], [own]).wait()
    backend.gather([every] if backend.rank() == 0 else [], [own], to_first).wait()
    backend.broadcast([own], from_first).wait()
    backend.barrier().wait()


def backend_of(group: Any) -> Any:
    """Return gloo's part of a group."""
    return group._get_backend(torch.device("cpu"))


def digest_of(ranks: tuple[int, ...]) -> str:
    """Return a short name for a group of ranks."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def leave(group: Any) -> None:
    """Free the connections and threads of a group. Not a collective call."""
    if is_initialized() and is_known(group):
        dist.destroy_process_group(group)


def disconnect(backend: Any, peers: Iterable[int]) -> list[int]:
    """Close the connections of a gloo group. Every thread that waits on a connection raises, here and on `peers`.

    Returns:
        The ranks in `peers` whose connections to this rank were closed before.
    """
    # Connections stay open while anything, such as a traceback, refers to them. Only a timed-out wait closes all
    # connections on every supported version of torch.
    works, lost = [], []
    for peer in peers:
        try:
            works.append(backend.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, _UNUSED_TAG))
        except RuntimeError:
            lost.append(peer)
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait(_AT_ONCE)
    return lost


def is_known(group: Any) -> bool:
    """Return True until torch has destroyed this group, or all groups."""
    return group in dist.distributed_c10d._world.pg_map
