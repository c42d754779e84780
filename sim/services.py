"""What the simulated machines and stores can do, each figure with where it comes from. Constants only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """A store.

    Attributes:
        partitions: key ranges that the store serves independently of each other.
        writes_per_s, reads_per_s: requests a second of one partition. Amazon S3 documents 3,500 and 5,500.
        burst_s: how many seconds' worth of requests an idle partition takes at once.
        latency_s, latency_sigma: median and sigma of the lognormal time to the first byte, for small and large alike.
        slow_share, slow_s: so many of the requests take about so many seconds more.
        connection_bytes_per_s: what one connection carries. Amazon's guidance counts on 85 to 90 MB/s a request.
        ceiling_bytes_per_s: what the store gives one job in all. No service documents one; see the document.
    """

    partitions: int = 64
    writes_per_s: float = 3500.0
    reads_per_s: float = 5500.0
    burst_s: float = 0.05
    latency_s: float = 0.060
    latency_sigma: float = 0.5
    slow_share: float = 0.001
    slow_s: float = 1.0
    connection_bytes_per_s: float = 90e6
    ceiling_bytes_per_s: float = 1e12


@dataclass(frozen=True)
class Cluster:
    """The job's machines.

    Attributes:
        nic_bytes_per_s: of one node to the store: 100 Gbit/s.
        connections: requests in flight of each rank.
        start_spread_s: the ranks begin within this time of each other.
    """

    ranks: int
    ranks_per_node: int = 8
    nic_bytes_per_s: float = 12.5e9
    connections: int = 24
    start_spread_s: float = 0.1

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def ideal_s(nbytes: int, cluster: Cluster, service: Service) -> float:
    """The bound that no schedule beats: all bytes through the narrowest of network cards, store and connections."""
    return max(
        nbytes / (cluster.nodes * cluster.nic_bytes_per_s),
        nbytes / service.ceiling_bytes_per_s,
        nbytes / (cluster.ranks * cluster.connections * service.connection_bytes_per_s),
    )
