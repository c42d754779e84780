"""Formulas for loads in which several replicas need the same bytes, and for the metadata that all ranks need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicas:
    """A load: `replicas` of `nbytes` each, on `nodes` nodes each.

    Attributes:
        nic: bytes a second between a node and the store.
        store: bytes a second that the store gives the job in all.
        exchange: bytes a second that a node exchanges with the other replicas.
        shared: the exchange takes the way of the reads, through the same network cards.
    """

    title: str
    nbytes: float
    replicas: int
    nodes: float
    nic: float
    store: float
    exchange: float
    shared: bool = False

    @property
    def each_reads_s(self) -> float:
        """Every replica reads all of it."""
        return max(self.nbytes / (self.nodes * self.nic), self.replicas * self.nbytes / self.store)

    @property
    def one_broadcasts_s(self) -> float:
        """One replica reads, then sends to the others."""
        reads = max(self.nbytes / (self.nodes * self.nic), self.nbytes / self.store)
        return reads + self.nbytes / (self.nodes * self.exchange)

    @property
    def shared_reads_s(self) -> float:
        """Each reads its share, and they exchange while they read."""
        if self.shared:
            return max(self.nbytes / (self.nodes * self.nic), self.nbytes / self.store)
        theirs = (self.replicas - 1) / self.replicas * self.nbytes / (self.nodes * self.exchange)
        return max(self.nbytes / (self.replicas * self.nodes * self.nic), self.nbytes / self.store, theirs)


GB = 1e9
CASES = (
    Replicas("405B weights, 16 replicas of 8 nodes, 50 GB/s fabric", 840 * GB, 16, 8, 12.5 * GB, 125 * GB, 50 * GB),
    Replicas("405B state, 20 replicas of 64 nodes, 50 GB/s fabric", 4059 * GB, 20, 64, 12.5 * GB, 1000 * GB, 50 * GB),
    Replicas("the same, a store of 125 GB/s", 4059 * GB, 20, 64, 12.5 * GB, 125 * GB, 50 * GB),
    Replicas("70B state, 8 replicas of 32 nodes, 50 GB/s fabric", 706 * GB, 8, 32, 12.5 * GB, 1000 * GB, 50 * GB),
    Replicas("8B, DDP on 8 ranks of one node, 300 GB/s memory", 96 * GB, 8, 1 / 8, 12.5 * GB, 1000 * GB, 300 * GB),
    Replicas("16 GB, 2 replicas, gloo on the same card", 16 * GB, 2, 1, 12.5 * GB, 1000 * GB, 12.5 * GB, shared=True),
)


def metadata_s(nbytes: float, decode_s: float, ranks: int, *, nic: float, store: float, once: bool) -> float:
    """Seconds until every rank has the metadata: read by each, or read by one and handed on along a binary tree."""
    nodes, levels = max(ranks / 8, 1), max(ranks - 1, 1).bit_length()
    if once:
        return nbytes / 90e6 + levels * nbytes / nic + decode_s
    return max(nbytes / 90e6, nbytes * ranks / min(store, nodes * nic)) + decode_s
