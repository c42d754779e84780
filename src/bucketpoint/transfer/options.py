"""Options of transfers, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.node_copy import NodeCopy
from bucketpoint.stores.retry import READ_ATTEMPTS

MIB = 1 << 20

Background = Literal["auto", "process", "thread"]


@dataclass(frozen=True)
class TransferOptions:
    """Sizes, parallelism and limits of the transfers of a save or a load. Sizes are in bytes.

    Attributes:
        part_bytes: target size of one upload part, which may come out up to half larger, and of one ranged read, of
            which a large load joins up to four.
            32 MiB: at a first-byte latency of 60 ms and 90 MB/s per connection, a part spends 85 % of its
            time moving bytes, and a 10 TB save costs 0.3 million requests instead of 1.2 million (at 8 MiB).
        connections: requests in flight at once, per save or load. 24: a store that gives each connection 25 to 90 MB/s
            then gives a rank 600 MB/s to 2 GB/s. More connections cost CPU on machines with few cores.
        max_inflight_bytes: memory for bytes that cannot be sent from, or received into, the caller's tensors directly
            (other devices, other dtypes, strided memory, transforms). The caller's memory is not counted.
        single_put_bytes: objects up to this size are uploaded in one request instead of in parts.
        coalesce_gap_bytes: two ranges of an object with at most this gap are read in one request: a request costs about
            as much time as these bytes.
        max_overread: largest ratio of bytes fetched to bytes needed in a coalesced request, once gaps exceed
            `free_gap_bytes`. Low, because every rank of a large job pays for it, and the ranks share the store's
            bandwidth.
        free_gap_bytes: gaps up to this size are always read over.
        read_attempts: attempts to read a range whose body broke off, the first included.
        max_metadata_bytes: limit on the memory of a checkpoint's metadata in a reader, whoever wrote it; a
            `.metadata` object of more than a sixteenth of it is not read. 16 GiB: 5 million items.
        nice: niceness (Linux) of the threads that transfer bytes.
        background: who uploads beside training. `"process"`: a separate process, which shares the staging memory
            but not the interpreter's lock; an error if that is impossible. `"thread"`: threads of the trainer.
            `"auto"`: a process, if one is possible and the rank stages at least 16 MiB; otherwise threads.
        background_nice: niceness of uploads beside training. None: 19, the highest, for a process, so that
            uploads take longer and training steps do not if every core is busy; 0 for threads of the trainer: a thread
            with a higher niceness is taken off its core while it holds the interpreter's lock that training waits for.
        node_copy: folder of the node in which saves keep a copy of what they send, and loads look before the bucket.
            By default the one that `BUCKETPOINT_NODE_COPY` names (`/local_nvme/ckpt:200GB`), if any. See
            docs/restart.md.

    Raises:
        BucketpointError: a setting is out of its range.
    """

    part_bytes: int = 32 * MIB
    connections: int = 24
    max_inflight_bytes: int = 64 * MIB
    single_put_bytes: int = 16 * MIB
    coalesce_gap_bytes: int = 1 * MIB
    max_overread: float = 1.02
    free_gap_bytes: int = 64 << 10
    read_attempts: int = READ_ATTEMPTS
    max_metadata_bytes: int = 16 << 30
    nice: int = 0
    background: Background = "auto"
    background_nice: int | None = None
    node_copy: NodeCopy | None = field(default_factory=NodeCopy.of_environment)

    def __post_init__(self) -> None:
        for name in (
            *("part_bytes", "connections", "max_inflight_bytes", "single_put_bytes", "read_attempts"),
            "max_metadata_bytes",
        ):
            if getattr(self, name) < 1:
                raise BucketpointError(f"TransferOptions.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("nice", "background_nice"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 19:
                raise BucketpointError(f"TransferOptions.{name} must be 0 to 19, not {getattr(self, name)}")
        if self.background not in get_args(Background):
            raise BucketpointError(
                f"TransferOptions.background={self.background!r} is not known",
                remedy=f"Choose one of {', '.join(get_args(Background))}",
            )
        if self.max_overread < 1:
            raise BucketpointError(f"TransferOptions.max_overread must be at least 1, not {self.max_overread}")

    def in_background(self, *, shares_lock: bool) -> TransferOptions:
        """Return the options for an upload beside training.

        Args:
            shares_lock: the upload runs on threads of the process that trains.
        """
        nice = self.background_nice if self.background_nice is not None else 0 if shares_lock else 19
        return replace(self, nice=max(self.nice, nice))

    @property
    def copied_part_bytes(self) -> int:
        """Largest part size if the store's client copies each body: eight copies fit the budget."""
        return max(self.max_inflight_bytes // 8, 1)

    @property
    def lease_bytes(self) -> int:
        """Size of one leased buffer: every connection gets one within the budget, but at least 1 MiB if it fits."""
        return max(self.max_inflight_bytes // self.connections, min(MIB, self.max_inflight_bytes))
