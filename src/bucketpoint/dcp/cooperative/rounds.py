"""One rank's part in a schedule: read its cells ahead, send them round by round, and assemble the received cells.

The caller's thread exchanges messages and copies bytes; store reads, checks and deliveries run on other threads.
Connections last for one load. They are separate from the caller's process group, so that messages never mix with other
collectives, and closing the connections wakes every waiting rank.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketpoint.dcp.cooperative.schedule import Cell, Schedule
from bucketpoint.dcp.meshes import Mesh
from bucketpoint.dcp.process_groups import backend_of
from bucketpoint.errors import PeerFailedError
from bucketpoint.forks import Monitor
from bucketpoint.stores import Store
from bucketpoint.transfer import BufferPool, Extent, Meter, Request, TaskGroup, TransferOptions, plan_requests
from bucketpoint.transfer.download import Assembly
from bucketpoint.transfer.long_reads import StallLimits, fetch_long

_READY_TAG = 0
FIRST_TAG = 1
_AT_ONCE = timedelta(milliseconds=1)

Message = tuple[int, int, memoryview]
"""Rank, tag and bytes of a message to or from another member. Both sides use the same tag."""


class Peers:
    """The members of a load, by rank in `mesh`. Each member makes all calls on one thread, in the same order.

    Every method that communicates raises PeerFailedError if a member is lost, or has aborted the load.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.group.rank()
        self.size: int = mesh.group.size()
        self._backend: Any = backend_of(mesh.group)

    def agree(self, peers: Sequence[int], within: timedelta | None = None) -> None:
        """Wait until all of `peers` have made this call, for at most `within`, by default the group's timeout."""
        ready, others = memoryview(bytearray(1)), [peer for peer in peers if peer != self.rank]
        received = [(peer, _READY_TAG, memoryview(bytearray(1))) for peer in others]
        self.move(received, [(peer, _READY_TAG, ready) for peer in others], within)

    def gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of every member; dtype and length of a row are the same everywhere."""
        with self._losing():
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._backend.allgather([counts], [torch.tensor([len(rows)])]).wait()
            padded = rows.new_zeros(max(map(int, counts)), *rows.shape[1:])
            padded[: len(rows)] = rows
            tables = [torch.empty_like(padded) for _ in counts]
            if padded.numel():
                self._backend.allgather([tables], [padded]).wait()
        return [table[: int(count)] for table, count in zip(tables, counts, strict=True)]

    def broadcast(self, data: bytes) -> memoryview:
        """Return the first member's `data` on all members."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._losing():
            length = torch.tensor([len(data)], device="cpu")
            self._backend.broadcast([length], options).wait()
            buffer = bytearray(data if self.rank == 0 else int(length))
            if buffer:
                self._backend.broadcast([torch.frombuffer(buffer, dtype=torch.uint8)], options).wait()
        return memoryview(buffer)

    def move(self, receives: Sequence[Message], sends: Sequence[Message], within: timedelta | None = None) -> None:
        """Receive and send all messages, within the group's timeout by default.

        In one call, a rank uses each tag, from `FIRST_TAG` on, once for each receiver.
        """
        limit = within or self.mesh.timeout
        ends = time.monotonic() + limit.total_seconds()
        # If gloo has already noticed a closed connection, it raises here and not in the wait.
        with self._losing(limit):
            works = [
                begin([torch.frombuffer(data, dtype=torch.uint8)], peer, tag)
                for begin, messages in ((self._backend.recv, receives), (self._backend.send, sends))
                for peer, tag, data in messages
            ]
            for work in works:
                work.wait(max(timedelta(seconds=ends - time.monotonic()), _AT_ONCE))

    @contextlib.contextmanager
    def _losing(self, limit: timedelta | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            seconds, reason = (limit or self.mesh.timeout).total_seconds(), str(error).partition("\n")[0][:300]
            raise PeerFailedError(
                f"One of {self.size} ranks that load together died, or did not answer for {seconds:.0f} s: {reason}",
                remedy="Read the error or the log of that rank, and load again on all ranks",
            ) from error


_FINISHERS = 2
"""Threads that verify and deliver. Two suffice: a checksum takes a tenth of the time in which the bytes arrive."""

# Shares of `max_inflight_bytes`. At most three rounds of bytes are held: one being received, one in requests that wait
# for more bytes, one in requests that are being verified. An eighth is left for requests that span many rounds.
_ROUND, _AHEAD, _ALONE, _KEPT = 1 / 8, 1 / 4, 1 / 4, 1 / 2

_GRAIN = 256 << 10
"""Least size of a buffer that is kept for reuse: cells are smaller than the parts of a plain load."""


def round_bytes(max_inflight_bytes: int) -> int:
    """Return the limit on the bytes of a round. `max_inflight_bytes`: the least of all ranks."""
    return max(int(max_inflight_bytes * _ROUND), 1)


class SharedLoad:
    """The run of a schedule on one rank.

    Args:
        requests: requests of this rank, in the order of the rank's rows in the schedule.
        numbers: the number of each object in the schedule, by key.
    """

    def __init__(
        self,
        exchange: Peers,
        schedule: Schedule,
        requests: Sequence[Request],
        numbers: Mapping[str, int],
        *,
        store: Store,
        options: TransferOptions,
        meter: Meter,
    ) -> None:
        self._exchange = exchange
        self._schedule = schedule
        self._options = options
        self._meter = meter
        self._pool = BufferPool(max(int(options.max_inflight_bytes * _ALONE), 1))
        self._store = store
        self._stalls = StallLimits()
        self._memory = BufferPool(int(options.max_inflight_bytes * _KEPT), grain=_GRAIN)
        self._targets = Targets(
            [(numbers[own.key], own) for own, shared in zip(requests, schedule.shared, strict=True) if shared],
            store.url,
            self._memory,
        )
        self._alone = deque(own for own, shared in zip(requests, schedule.shared, strict=True) if not shared)
        mine = [cell for cells in schedule.rounds for cell in cells if cell.reader == exchange.rank]
        meter.expect(sum(cell.nbytes for cell in mine) + sum(request.nbytes for request in self._alone))

        # The attributes below that other threads use are changed only while the condition is held.
        self._state = Monitor()
        self._error: BaseException | None = None
        self._alone_left = len(self._alone)
        self._cells = deque(mine)
        self._read: dict[tuple[int, int], memoryview] = {}
        # The last cell of each started read, until that cell is sent.
        self._ahead: set[tuple[int, int]] = set()
        self._ahead_bytes = 0
        self._ahead_limit = int(options.max_inflight_bytes * _AHEAD)
        self._finishing = 0
        self._finishing_bytes = 0

    def run(self, taking_part: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Load all of this rank's bytes. `taking_part`: context that reports a failure of this rank to the others."""
        options = self._options
        with (
            TaskGroup(options.connections, name="bucketpoint-download", nice=options.nice) as reading,
            TaskGroup(_FINISHERS, name="bucketpoint-verify", nice=options.nice) as finishing,
            # Innermost, so that the other ranks receive an error before this rank waits for its threads to end.
            taking_part(),
        ):
            self._read_ahead(reading, self._schedule.rounds[0] if self._schedule.rounds else ())
            for _ in range(min(options.connections, len(self._alone))):
                reading.start(self._watched(lambda: self._fetch_alone(reading)))
            for cells in self._schedule.rounds:
                self._read_ahead(reading, cells)
                self._wait_for(lambda cells=cells: self._is_ready(cells))  # type: ignore[misc]
                self._agree()
                self._hand_out(cells, finishing)
            self._wait_for(lambda: not self._alone_left and not self._finishing)
            self._agree()

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read_ahead(self, reading: TaskGroup, cells: Sequence[Cell]) -> None:
        """Start reads of this rank's cells: all cells of the round, and later cells while memory is free."""
        due = {(cell.obj, cell.start) for cell in cells}
        joined: list[tuple[Cell, memoryview]] = []
        while self._cells:
            cell = self._cells[0]
            direct = self._targets.direct(cell)
            staged = 0 if direct is not None else cell.nbytes
            follows = bool(joined) and self._follows(joined[0][0], joined[-1][0], cell)
            room = self._ahead_bytes + staged <= self._ahead_limit and (
                follows or len(self._ahead) + bool(joined) < 2 * self._options.connections
            )
            if not room and (cell.obj, cell.start) not in due:
                break
            if not follows:
                self._start(reading, joined)
                joined = []
            self._cells.popleft()
            self._ahead_bytes += staged
            joined.append((cell, direct if direct is not None else self._memory.take(cell.nbytes)))
        self._start(reading, joined)

    def _follows(self, first: Cell, last: Cell, cell: Cell) -> bool:
        """Return True if a cell can be read in one request with those from `first` to `last`."""
        most = self._schedule.cell_bytes
        return (last.obj, last.stop) == (cell.obj, cell.start) and cell.stop - first.start <= most

    def _start(self, reading: TaskGroup, cells: Sequence[tuple[Cell, memoryview]]) -> None:
        if cells:
            self._ahead.add((cells[-1][0].obj, cells[-1][0].start))
            reading.start(self._watched(lambda: self._read_cells(cells)))

    def _read_cells(self, cells: Sequence[tuple[Cell, memoryview]]) -> None:
        extents = []
        for cell, view in cells:
            of = self._targets.holding(cell)[0].request
            extents.append(Extent(of.key, cell.start, cell.stop, lambda _: None, (), view, cell.start, etag=of.etag))
        for request in plan_requests(extents, self._options):
            self._fetch(request)
        with self._state:
            self._read.update({(cell.obj, cell.start): view for cell, view in cells})

    def _fetch(self, request: Request) -> None:
        fetch_long(self._store, [request], self._options, self._pool, self._meter, self._stalls)

    def _fetch_alone(self, reading: TaskGroup) -> None:
        """Fetch one request that only this rank needs, then queue the next one behind the cells queued meanwhile."""
        try:
            request = self._alone.popleft()
        except IndexError:
            return
        self._fetch(request)
        with self._state:
            self._alone_left -= 1
        reading.start(self._watched(lambda: self._fetch_alone(reading)))

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _is_ready(self, cells: Sequence[Cell]) -> bool:
        """Return True if this rank has read its cells of a round, and few earlier bytes still await verification."""
        if self._finishing_bytes > self._options.max_inflight_bytes * _ROUND:
            return False
        return all((cell.obj, cell.start) in self._read for cell in cells if cell.reader == self._exchange.rank)

    def _agree(self) -> None:
        """Wait until all peers are ready for a round, before any rank sends bytes of the round."""
        with self._state:
            error = self._error
        if error is not None:
            raise error
        self._exchange.agree(self._schedule.peers)

    def _hand_out(self, cells: Sequence[Cell], finishing: TaskGroup) -> None:
        here = self._exchange.rank
        sends: list[Message] = []
        receives: list[Message] = []
        arrived: list[tuple[Cell, memoryview | None]] = []
        tags: Counter[int] = Counter()
        for cell in cells:
            if cell.reader == here:
                view, staying = self._take(cell)
                for peer in cell.ranks:
                    if peer != here:
                        sends.append((peer, FIRST_TAG + tags[peer], view))
                        tags[peer] += 1
            elif cell.ranks:
                place = self._targets.place(cell)
                view, staying = (self._memory.take(cell.nbytes), False) if place is None else (place, True)
                receives.append((cell.reader, FIRST_TAG + tags[~cell.reader], view))
                tags[~cell.reader] += 1
            else:
                continue
            arrived.append((cell, None if staying else view))
        self._exchange.move(receives, sends)
        for cell, copied in arrived:
            self._settle(cell, copied, finishing)
            if copied is not None:
                self._memory.give(copied)

    def _take(self, cell: Cell) -> tuple[memoryview, bool]:
        """Take a cell that this rank has read. Return the bytes, and True if they are in the caller's memory."""
        with self._state:
            view = self._read.pop((cell.obj, cell.start))
        staying = self._targets.direct(cell) is not None
        self._ahead.discard((cell.obj, cell.start))
        if not staying:
            self._ahead_bytes -= cell.nbytes
        return view, staying

    def _settle(self, cell: Cell, copied: memoryview | None, finishing: TaskGroup) -> None:
        for assembly in self._targets.holding(cell):
            if copied is not None:
                assembly.put(cell.start, copied)
            if not assembly.arrived(cell.nbytes):
                continue
            with self._state:
                self._finishing += 1
                self._finishing_bytes += assembly.leased
            finishing.start(self._watched(lambda assembly=assembly: self._finish(assembly)))  # type: ignore[misc]

    def _finish(self, assembly: Assembly) -> None:
        leased = assembly.leased
        assembly.finish()
        with self._state:
            self._finishing -= 1
            self._finishing_bytes -= leased

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._state:
            self._state.wait_for(lambda: self._error is not None or condition())

    def _watched(self, task: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                task()
            except BaseException as error:
                with self._state:
                    self._error = self._error or error
                    self._state.notify_all()
                raise
            with self._state:
                self._state.notify_all()

        return run


class Targets:
    """The shared requests of a rank by number of the object, each with its assembly.

    A request contains a cell completely or not at all.
    """

    def __init__(self, shared: Sequence[tuple[int, Request]], url: str, memory: BufferPool) -> None:
        self._by_object: dict[int, list[Assembly]] = {}
        self._longest: dict[int, int] = {}
        for number, request in sorted(shared, key=lambda entry: entry[1].start):
            assembly = Assembly(url, request, memory.take, memory.give)
            self._by_object.setdefault(number, []).append(assembly)
            self._longest[number] = max(self._longest.get(number, 0), request.nbytes)

    def holding(self, cell: Cell) -> list[Assembly]:
        """Return the assemblies of the requests that contain a cell: several if the rank needs the bytes twice."""
        entries = self._by_object[cell.obj]
        first = bisect.bisect_right(
            entries, cell.start - self._longest[cell.obj], key=lambda entry: entry.request.start
        )
        near = itertools.takewhile(lambda entry: entry.request.start <= cell.start, entries[first:])
        return [entry for entry in near if entry.request.stop > cell.start]

    def direct(self, cell: Cell) -> memoryview | None:
        """Return the caller's memory in which a cell can be received, and from which it can be sent; else None."""
        assemblies = self.holding(cell)
        return assemblies[0].direct(cell.start, cell.stop) if len(assemblies) == 1 else None

    def place(self, cell: Cell) -> memoryview | None:
        """Return memory of the caller or of the assembly in which a cell can be received; else None."""
        assemblies = self.holding(cell)
        return assemblies[0].place(cell.start, cell.stop) if len(assemblies) == 1 else None
