"""Options of transfers, with the reason for each default, and counters of transferred bytes and requests."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from bucketpoint.errors import BucketpointError
from bucketpoint.stores.retry import READ_ATTEMPTS

MIB = 1 << 20

Background = Literal["auto", "process", "thread"]

VARIABLE = "BUCKETPOINT_NODE_COPY"

_SETTING = re.compile(r"(/.*):([0-9]+)([KMGT]?)B?")


@dataclass(frozen=True)
class NodeCopy:
    """Folder on a node for copies of the data objects that saves send and loads read, for later loads.

    All processes of the job on the node share the folder. It is made with mode 0700, and not used if it is a link, has
    another owner, or grants rights to others.

    Attributes:
        path: absolute path: on a disk of the node, or in memory (below /dev/shm).
        max_bytes: limit on the bytes of its files. Objects of the oldest checkpoint are deleted first, but none of the
            checkpoint that is being copied: so two checkpoints should fit.

    Raises:
        BucketpointError: the path is not absolute, or the limit is not positive.
    """

    path: str
    max_bytes: int

    def __post_init__(self) -> None:
        if not os.path.isabs(self.path) or self.max_bytes < 1:
            raise BucketpointError(f"NodeCopy needs an absolute path and a limit, not {self.path!r}, {self.max_bytes}")

    @classmethod
    def parse(cls, text: str) -> NodeCopy:
        """Parse a text such as `/local_nvme/ckpt:200GB`.

        Raises:
            BucketpointError: the text has another form.
        """
        match = _SETTING.fullmatch(text)
        if match is None:
            raise BucketpointError(f"{text!r} is no folder with a limit", remedy="Write it as /local_nvme/ckpt:200GB")
        return cls(match[1], int(match[2]) * 1000 ** " KMGT".index(match[3] or " "))

    @classmethod
    def of_environment(cls) -> NodeCopy | None:
        """Return the copy that `BUCKETPOINT_NODE_COPY` describes; None if the variable is not set."""
        text = os.environ.get(VARIABLE)
        return cls.parse(text) if text else None


@dataclass(frozen=True)
class TransferOptions:
    """Sizes, parallelism and limits of the transfers of a save or a load. Sizes are in bytes.

    Attributes:
        part_bytes: target size of an upload part and of a ranged read. An upload part may be up to half larger, and a
            read in a large load up to four parts long.
            32 MiB: at a first-byte latency of 60 ms and 90 MB/s per connection, a part spends 85 % of its
            time moving bytes, and a 10 TB save costs 0.3 million requests instead of 1.2 million (at 8 MiB).
        connections: maximum number of concurrent requests of a save or load. 24: at 25 to 90 MB/s per connection, a
            rank transfers 600 MB/s to 2 GB/s. More connections cost CPU time on machines with few cores.
        max_inflight_bytes: memory for bytes that cannot be sent directly from the caller's tensors, or received
            directly into them (other devices, other dtypes, strided memory, transforms).
        single_put_bytes: objects up to this size are uploaded in one request instead of in parts.
        coalesce_gap_bytes: two ranges of an object with at most this gap are read in one request: a second request
            would take about as long as reading the gap.
        max_overread: largest ratio of bytes fetched to bytes needed in a request for several ranges. It is low because
            the ranks of a large job share the store's bandwidth. Gaps up to `free_gap_bytes` may exceed it.
        free_gap_bytes: gaps up to this size are read whatever the ratio.
        read_attempts: attempts, including the first, to read a range whose response breaks off.
        max_metadata_bytes: limit on a reader's memory for the metadata of a checkpoint. A `.metadata` object larger
            than a sixteenth of the limit is not read. 16 GiB suffice for 5 million items.
        nice: niceness (Linux) of the threads that transfer bytes.
        background: where uploads run during training. `"process"`: a separate process, which shares the staging memory
            but not the interpreter's lock (GIL); an error if that is impossible. `"thread"`: threads of the trainer.
            `"auto"`: a process, if one is possible and the rank stages at least 16 MiB; otherwise threads.
        background_nice: niceness of uploads during training. None: for a process 19, the highest, so that busy cores
            slow the upload down and not the training steps; for threads of the trainer 0, because a thread with a
            higher niceness may lose its core while it holds the GIL, for which training waits.
        node_copy: local folder in which saves keep a copy of the uploaded bytes, and which loads read before the
            bucket. Default: the folder in `BUCKETPOINT_NODE_COPY` (such as `/local_nvme/ckpt:200GB`), if that is set.
            See docs/loading.md.

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
                f"TransferOptions.background={self.background!r} is invalid",
                remedy=f"Choose one of {', '.join(get_args(Background))}",
            )
        if self.max_overread < 1:
            raise BucketpointError(f"TransferOptions.max_overread must be at least 1, not {self.max_overread}")

    def in_background(self, *, shares_lock: bool) -> TransferOptions:
        """Return the options for an upload during training. `shares_lock`: the trainer's threads run the upload."""
        nice = self.background_nice if self.background_nice is not None else 0 if shares_lock else 19
        return replace(self, nice=max(self.nice, nice))

    @property
    def copied_part_bytes(self) -> int:
        """Maximum part size if the store's client copies each body: eight copies then fit the budget."""
        return max(self.max_inflight_bytes // 8, 1)

    @property
    def lease_bytes(self) -> int:
        """Size of one leased buffer: a connection's share of the budget, but at least 1 MiB if the budget allows."""
        return max(self.max_inflight_bytes // self.connections, min(MIB, self.max_inflight_bytes))


@dataclass(frozen=True)
class Progress:
    """Progress of one save or load of this rank, in bytes of data objects. The commit is not counted.

    Attributes:
        phase: `"save"` or `"load"`; for a command `"convert"`, `"cp"` or `"verify"`.
        url: URL of the checkpoint.
        done_bytes: bytes transferred so far.
        total_bytes: bytes to transfer in all; 0 while not known.
        finished: True in the last event.
    """

    phase: str
    url: str
    done_bytes: int
    total_bytes: int
    finished: bool = False


ProgressCallback = Callable[[Progress], None]


class Meter:
    """Thread-safe counters of one save or load, reported to a callback as they grow."""

    def __init__(self, phase: str, url: str, total_bytes: int, callback: ProgressCallback | None) -> None:
        self._phase = phase
        self._url = url
        self._callback = callback
        self._lock = threading.Lock()
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.requests = 0
        self.node_bytes = 0
        self._repeated = 0

    def expect(self, nbytes: int) -> None:
        """Set the total to the bytes already done plus `nbytes`."""
        self.total_bytes = self.done_bytes + nbytes

    def begin_again(self) -> None:
        """Ignore the next `done_bytes` bytes that `add` is called for: they are transferred a second time."""
        with self._lock:
            self._repeated = self.done_bytes

    def add(self, nbytes: int, *, requests: int = 1, from_node: int = 0) -> None:
        """Count transferred bytes and requests. `from_node`: how many of the bytes were read from the node's copy."""
        with self._lock:
            self.node_bytes += from_node
            again = min(nbytes, self._repeated)
            self._repeated -= again
            self.done_bytes += nbytes - again
            self.requests += requests
            # Called with the lock held, so that a callback never receives a smaller count than before.
            self._report(finished=False)

    def finish(self) -> None:
        with self._lock:
            self._report(finished=True)

    def _report(self, *, finished: bool) -> None:
        if self._callback is not None:
            self._callback(Progress(self._phase, self._url, self.done_bytes, self.total_bytes, finished))
