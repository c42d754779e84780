"""How bytes are moved: the few numbers that a user may change, with the reason for each default. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bucketpoint.errors import BucketpointError

MIB = 1 << 20


@dataclass(frozen=True)
class Hedge:
    """When a range that is late is asked for a second time, over another connection. The reply that is whole first
    counts. After "The Tail at Scale" (Dean and Barroso, 2013), and S3's advice to repeat the slowest requests.

    Attributes:
        quantile: a range is late when it takes longer than this share of recent ranges of about its size did, and at
            least twice as long as half of them. 0.95: one in twenty is looked at twice.
        after_s: seconds after which a range is late, instead of the quantile. For loads of few ranges: the quantile is
            known after ten of them.
        most_extra: second requests over requests, at most. A store that is slow as a whole is not asked twice as much.
    """

    quantile: float = 0.95
    after_s: float | None = None
    most_extra: float = 0.05

    def __post_init__(self) -> None:
        if not 0.5 <= self.quantile < 1:
            raise BucketpointError(f"Hedge.quantile must be at least 0.5 and less than 1, not {self.quantile}")
        if self.after_s is not None and not self.after_s > 0:
            raise BucketpointError(f"Hedge.after_s must be more than 0 seconds, not {self.after_s}")
        if not 0 < self.most_extra <= 1:
            raise BucketpointError(f"Hedge.most_extra must be more than 0 and at most 1, not {self.most_extra}")


@dataclass(frozen=True)
class TransferOptions:
    """Sizes in bytes.

    Attributes:
        part_bytes: the size aimed at for one upload part, which may come out at up to half more, and one ranged read.
            32 MiB: at a first-byte latency of 60 ms and 90 MB/s a connection, a part spends 85 % of its time moving
            bytes, and a 10 TB save costs 0.3 million requests and not 1.2 million (at 8 MiB).
        connections: requests in flight at once, a save or a load. 24: a store that gives each connection 25 to 90 MB/s
            then gives a rank 600 MB/s to 2 GB/s. More of them cost CPU where there are few cores.
        max_inflight_bytes: memory of our own for bytes that cannot be sent from, or received into, the caller's
            tensors (other devices, other dtypes, strided memory, transforms). The caller's memory is not counted.
        single_put_bytes: objects up to this size go up in one request instead of as parts.
        coalesce_gap_bytes: two ranges of an object this close are read in one request: a request costs about as much
            time as these bytes do.
        max_overread: bytes fetched over bytes needed that coalescing may reach, once gaps exceed `free_gap_bytes`. Low,
            since every rank of a large job pays for it, and a store's bandwidth is what they share.
        free_gap_bytes: gaps so small that they are always read over.
        read_attempts: how often a range whose body broke off is asked for in all.
        hedge: when a load asks for a late range a second time (S3 and GCS). None, the default: never. It costs
            requests, and helps where a few ranges take much longer than the others.
        nice: niceness (Linux) of the threads that move bytes.
        background_nice: the same for those that upload while training goes on. 19, the highest: where every core is
            busy the upload takes longer, and training steps do not. 0 where uploads must keep their share.
    """

    part_bytes: int = 32 * MIB
    connections: int = 24
    max_inflight_bytes: int = 64 * MIB
    single_put_bytes: int = 16 * MIB
    coalesce_gap_bytes: int = 1 * MIB
    max_overread: float = 1.02
    free_gap_bytes: int = 64 << 10
    read_attempts: int = 5
    hedge: Hedge | None = None
    nice: int = 0
    background_nice: int = 19

    def __post_init__(self) -> None:
        for name in ("part_bytes", "connections", "max_inflight_bytes", "single_put_bytes", "read_attempts"):
            if getattr(self, name) < 1:
                raise BucketpointError(f"TransferOptions.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("nice", "background_nice"):
            if not 0 <= getattr(self, name) <= 19:
                raise BucketpointError(f"TransferOptions.{name} must be 0 to 19, not {getattr(self, name)}")
        if self.max_overread < 1:
            raise BucketpointError(f"TransferOptions.max_overread must be at least 1, not {self.max_overread}")

    def in_background(self) -> TransferOptions:
        """The options of an upload beside training."""
        return replace(self, nice=max(self.nice, self.background_nice))

    @property
    def copied_part_bytes(self) -> int:
        """Size of a part of which the store holds a copy: eight are under way within the budget."""
        return max(self.max_inflight_bytes // 8, 1)

    @property
    def lease_bytes(self) -> int:
        """Size of one leased buffer: small enough that every connection gets one within the budget."""
        return max(self.max_inflight_bytes // self.connections, min(MIB, self.max_inflight_bytes))
