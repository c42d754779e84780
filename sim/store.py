"""A discrete model of many ranks at one store: partitions, latencies, connections, network cards, a ceiling.

Time goes on in small steps; within one, moments are kept exactly, so that no request is rounded up to a step. All that
a rank does in what order is what `transfer` does: creates first, then parts as their upload is created, the last part
of an object completes it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from sim.limiters import Floats, Ints, Limiters
from sim.services import Cluster, Service, ideal_s

ASK, ACCEPTED, REFUSED = 0, 1, 2
"""Entries of the calendar: a request is sent, its first byte or its 503 arrives."""

OPEN, PART, COMPLETE = 0, 1, 2
"""What a connection is busy with: CreateMultipartUpload (or the one PUT of a small object), a part, the completion."""


@dataclass(frozen=True)
class ObjectWork:
    """One object of a rank: the bytes of each part or range. `multipart` ones take two requests more."""

    parts: tuple[int, ...]
    multipart: bool


@dataclass(frozen=True)
class Work:
    """What each rank moves: the same for all, only under different keys."""

    objects: tuple[ObjectWork, ...]
    write: bool

    @property
    def nbytes(self) -> int:
        return sum(sum(each.parts) for each in self.objects)

    @property
    def requests(self) -> int:
        return sum(len(each.parts) + 2 * each.multipart for each in self.objects)


@dataclass(frozen=True)
class Outcome:
    """What came of one simulated transfer.

    Attributes:
        wall_s: from the first rank's start to the last answer; where ranks failed, until the first of them did.
        requests: accepted by the store.
        refused: answered 503.
        failed: a request was not accepted before its deadline, which fails the save or load as a whole.
        peak_per_partition: most requests that one partition accepted within a second.
        admitted: for each partition and step, how many requests it accepted.
    """

    wall_s: float
    ideal_s: float
    requests: int
    nbytes: int
    refused: int
    failed: bool
    peak_per_partition: int
    step_s: float
    admitted: Ints

    @property
    def over_ideal(self) -> float:
        return self.wall_s / self.ideal_s


def simulate(
    work: Work,
    partition_of: Ints,
    cluster: Cluster,
    service: Service,
    *,
    seed: int,
    refuse: bool = False,
    step_s: float | None = None,
) -> Outcome:
    """Run one transfer to its end.

    Args:
        partition_of: for each rank and object, the partition of its key, int64[ranks, objects].
        refuse: answer 503 where a partition is at its rate, as S3 does, and let the client send fewer at once and
            try again, as `bucketpoint.stores.retry` does; else requests wait in line at the store.
        step_s: length of a step; default: a 400th of the ideal time, between 5 and 50 ms.
    """
    bound = ideal_s(work.nbytes * cluster.ranks, cluster, service)
    step = step_s or min(max(bound / 400, 0.005), 0.050)
    return _Run(work, partition_of, cluster, service, seed, refuse, step).run(bound)


class _Run:
    """The state of one simulated transfer. A slot is one connection of one rank."""

    def __init__(
        self,
        work: Work,
        partition_of: Ints,
        cluster: Cluster,
        service: Service,
        seed: int,
        refuse: bool,
        step: float,
    ) -> None:
        self.work, self.cluster, self.service, self.refuse, self.step = work, cluster, service, refuse, step
        self.random = np.random.default_rng(seed)
        ranks, slots, kinds = cluster.ranks, cluster.ranks * cluster.connections, len(work.objects)
        self.kinds = kinds
        self.partition = partition_of.reshape(-1)
        self.parts = np.array([len(each.parts) for each in work.objects], np.int64)
        self.sizes = np.zeros((kinds, int(self.parts.max())), np.float64)
        for at, each in enumerate(work.objects):
            self.sizes[at, : len(each.parts)] = each.parts
        self.opens = np.array([work.write] * kinds)
        self.multipart = np.array([each.multipart for each in work.objects])
        self.task = np.zeros(slots, np.int64)
        self.object = np.zeros(slots, np.int64)
        self.part = np.zeros(slots, np.int64)
        self.idle = np.ones(slots, bool)
        # A rank's queue: objects in the order in which their parts became ready, and how far it has come.
        self.next_open = np.zeros(ranks, np.int64)
        self.ready = np.zeros((ranks, kinds), np.int64)
        self.ready_count = np.zeros(ranks, np.int64)
        self.at_object = np.zeros(ranks, np.int64)
        self.at_part = np.zeros(ranks, np.int64)
        self.parts_left = np.tile(self.parts, ranks)
        self.limiters = Limiters(ranks, cluster.connections)
        self.objects_left = ranks * kinds
        self.lines: list[deque[Ints]] = [deque() for _ in range(service.partitions)]
        self.lined_up = 0
        self.tokens = np.zeros(service.partitions)
        self.calendar: dict[int, list[tuple[Ints, Floats, int]]] = defaultdict(list)
        self.moving = np.zeros(0, np.int64)
        self.node = np.zeros(0, np.int64)
        self.mark = np.zeros(0)
        self.sent = np.zeros(cluster.nodes)
        self.count = np.zeros(cluster.nodes, np.int64)
        self.admitted: list[Ints] = []
        self.requests = self.refused = 0
        self.nbytes = 0.0
        self.now = self.end = 0.0
        self.at_step = 0

    def run(self, bound: float) -> Outcome:
        self._start()
        while self.objects_left and not self.limiters.gave_up:
            self.now = self.at_step * self.step
            finished, times = self._advance()
            asking, asked = self._next_tasks(finished, times)
            self._try_again()
            woken, woken_at = self._due(ASK)
            self._admit(np.concatenate([woken, asking]), np.concatenate([woken_at, asked]))
            self.calendar.pop(self.at_step, None)
            self.at_step += 1
        admitted = np.array(self.admitted, np.int64).T
        window = max(1, round(1 / self.step))
        summed = np.cumsum(np.pad(admitted, ((0, 0), (window, 0))), axis=1)
        peak = int((summed[:, window:] - summed[:, :-window]).max()) if admitted.size else 0
        failed = self.limiters.gave_up
        wall = self.now if failed else self.end
        return Outcome(wall, bound, self.requests, round(self.nbytes), self.refused, failed, peak, self.step, admitted)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ranks, connections = self.cluster.ranks, self.cluster.connections
        starts = self.random.uniform(0, self.cluster.start_spread_s, ranks)
        if not self.work.write:
            self.ready[:] = np.arange(self.kinds)
            self.ready_count[:] = self.kinds
            self.next_open[:] = self.kinds
        slots = np.arange(ranks * connections)
        taken, times = self._take(slots, np.repeat(starts, connections))
        self._schedule(taken, times, ASK)

    def _advance(self) -> tuple[Ints, Floats]:
        """Bytes move for one step. Returns the slots whose request ended, in the order in which they did, and when."""
        ended: list[Ints] = []
        moments: list[Floats] = []
        slots, times = self._due(ACCEPTED)
        if slots.size:
            body = self._body(slots)
            ended.append(slots[body == 0])
            moments.append(times[body == 0])
            self._begin(slots[body > 0], times[body > 0], body[body > 0])
        if self.moving.size:
            # All transfers of a node go equally fast: one clock of bytes a node, and each ends at a mark on it.
            rate = self._rates()
            before = self.sent
            self.sent = before + rate * self.step
            done = self.mark <= self.sent[self.node]
            if done.any():
                node = self.node[done]
                ended.append(self.moving[done])
                moments.append(self.now + np.maximum(self.mark[done] - before[node], 0) / rate[node])
                self.nbytes += float(self._body(self.moving[done]).sum())
                self.count -= np.bincount(node, minlength=self.cluster.nodes)
                self.moving, self.mark, self.node = self.moving[~done], self.mark[~done], self.node[~done]
        if not ended:
            return np.zeros(0, np.int64), np.zeros(0)
        slots, times = np.concatenate(ended), np.concatenate(moments)
        order = np.argsort(times, kind="stable")
        return slots[order], times[order]

    def _begin(self, slots: Ints, times: Floats, body: Floats) -> None:
        if not slots.size:
            return
        node = slots // (self.cluster.connections * self.cluster.ranks_per_node)
        self.count += np.bincount(node, minlength=self.cluster.nodes)
        # What the node's clock counts in this step before the transfer begins is not the transfer's.
        late = np.maximum(times - self.now, 0)
        self.moving = np.concatenate([self.moving, slots])
        self.node = np.concatenate([self.node, node])
        self.mark = np.concatenate([self.mark, self.sent[node] + body + late * self._rates()[node]])

    def _rates(self) -> Floats:
        """Bytes a second of a transfer, by node: a fair share of its card and of the store, within a connection's."""
        count = self.count
        rate: Floats = np.minimum(
            self.service.connection_bytes_per_s, self.cluster.nic_bytes_per_s / np.maximum(count, 1)
        )
        ceiling = self.service.ceiling_bytes_per_s
        if float((rate * count).sum()) <= ceiling:
            return rate
        # Fair shares of the ceiling: nodes that cannot use theirs leave the rest to the others.
        order = np.argsort(rate, kind="stable")
        below = np.concatenate([[0.0], np.cumsum((rate * count)[order])[:-1]])
        above = np.cumsum(count[order][::-1])[::-1]
        level = (ceiling - below) / np.maximum(above, 1)
        shared: Floats = np.minimum(rate, level[int(np.argmax(level <= rate[order]))])
        return shared

    def _next_tasks(self, slots: Ints, times: Floats) -> tuple[Ints, Floats]:
        """What comes of requests that ended: parts become ready, objects complete, connections take the next task."""
        if not slots.size:
            return slots, times
        self.end = max(self.end, float(times[-1]))
        self.limiters.succeeded(slots)
        task, kind = self.task[slots], self.object[slots] % self.kinds
        opened = (task == OPEN) & self.multipart[kind]
        woken, woken_at = self._make_ready(slots[opened], times[opened])
        parts = np.flatnonzero(task == PART)
        np.subtract.at(self.parts_left, self.object[slots[parts]], 1)
        last = parts[self.parts_left[self.object[slots[parts]]] == 0]
        # Times ascend: of several parts of an object that ended in this step, the latest completes it.
        _, reverse = np.unique(self.object[slots[last]][::-1], return_index=True)
        last = last[::-1][reverse]
        completing = last[self.multipart[self.object[slots[last]] % self.kinds]]
        done = np.count_nonzero(task == COMPLETE) + np.count_nonzero((task == OPEN) & ~opened)
        self.objects_left -= int(done) + last.size - completing.size
        self.task[slots[completing]] = COMPLETE
        free = np.ones(slots.size, bool)
        free[completing] = False
        candidates = np.concatenate([slots[free], woken])
        at = np.concatenate([times[free], woken_at])
        order = np.argsort(at, kind="stable")
        taken, taken_at = self._take(candidates[order], at[order])
        return np.concatenate([slots[completing], taken]), np.concatenate([times[completing], taken_at])

    def _make_ready(self, slots: Ints, times: Floats) -> tuple[Ints, Floats]:
        """The parts of created uploads join their ranks' queues. Returns the connections that were waiting for work."""
        width = self.cluster.connections
        woken: list[Ints] = []
        at: list[Floats] = []
        for rank, kind, time in zip(slots // width, self.object[slots] % self.kinds, times, strict=True):
            self.ready[rank, self.ready_count[rank]] = kind
            self.ready_count[rank] += 1
            waiting = np.flatnonzero(self.idle[rank * width : (rank + 1) * width]) + rank * width
            self.idle[waiting] = False
            woken.append(waiting)
            at.append(np.full(waiting.size, time))
        if not woken:
            return np.zeros(0, np.int64), np.zeros(0)
        return np.concatenate(woken), np.concatenate(at)

    def _take(self, slots: Ints, times: Floats) -> tuple[Ints, Floats]:
        """Give each slot the next task of its rank, in the order given; those for which there is none become idle."""
        taken: list[Ints] = []
        moments: list[Floats] = []
        while slots.size:
            rank, first = np.unique(slots // self.cluster.connections, return_index=True)
            chosen, when = slots[first], times[first]
            opens = self.next_open[rank] < self.kinds
            sends = ~opens & (self.at_object[rank] < self.ready_count[rank])
            self._open(chosen[opens], rank[opens])
            self._send(chosen[sends], rank[sends])
            busy = opens | sends
            self.idle[chosen] = ~busy
            taken.append(chosen[busy])
            moments.append(when[busy])
            rest = np.ones(slots.size, bool)
            rest[first] = False
            slots, times = slots[rest], times[rest]
        if not taken:
            return np.zeros(0, np.int64), np.zeros(0)
        return np.concatenate(taken), np.concatenate(moments)

    def _open(self, slots: Ints, rank: Ints) -> None:
        self.task[slots] = OPEN
        self.object[slots] = rank * self.kinds + self.next_open[rank]
        self.part[slots] = 0
        self.next_open[rank] += 1

    def _send(self, slots: Ints, rank: Ints) -> None:
        kind = self.ready[rank, self.at_object[rank]]
        self.task[slots] = PART
        self.object[slots] = rank * self.kinds + kind
        self.part[slots] = self.at_part[rank]
        over = self.at_part[rank] + 1 == self.parts[kind]
        self.at_part[rank] = np.where(over, 0, self.at_part[rank] + 1)
        self.at_object[rank] += over

    def _body(self, slots: Ints) -> Floats:
        """Bytes of the request that each slot is busy with."""
        kind = self.object[slots] % self.kinds
        empty = (self.task[slots] == COMPLETE) | ((self.task[slots] == OPEN) & self.multipart[kind])
        body: Floats = np.where(empty, 0.0, self.sizes[kind, self.part[slots]])
        return body

    # -- the store's door ---------------------------------------------------------------------------------------------

    def _due(self, kind: int) -> tuple[Ints, Floats]:
        """The calendar's entries of this kind for this step: the slots, and when."""
        due = [(slots, times) for slots, times, each in self.calendar.get(self.at_step, ()) if each == kind]
        if not due:
            return np.zeros(0, np.int64), np.zeros(0)
        return np.concatenate([slots for slots, _ in due]), np.concatenate([times for _, times in due])

    def _try_again(self) -> None:
        """Let the ranks whose requests were answered 503 wait, and send fewer at once."""
        slots, times = self._due(REFUSED)
        if slots.size:
            self._schedule(slots, self.limiters.refused(slots, times, self.random), ASK)

    def _admit(self, slots: Ints, times: Floats) -> None:
        """Partitions accept what their rate allows; the rest waits in line, or is told to come back."""
        slots, times = self.limiters.enter(slots, times, self.now)
        rate = self.service.writes_per_s if self.work.write else self.service.reads_per_s
        room = max(rate * self.service.burst_s, rate * self.step, 1.0)
        self.tokens = np.minimum(self.tokens + rate * self.step, room)
        where = self.partition[self.object[slots]]
        allowed = self.tokens.astype(np.int64)
        counts = np.bincount(where, minlength=self.service.partitions)
        if self.lined_up or bool((counts > allowed).any()):
            order = np.argsort(times, kind="stable")
            slots, times, counts = self._queue(slots[order], times[order], where[order], allowed)
        self._answer(slots, times)
        self.tokens -= counts
        self.requests += int(counts.sum())
        self.admitted.append(counts)

    def _queue(self, slots: Ints, times: Floats, where: Ints, allowed: Ints) -> tuple[Ints, Floats, Ints]:
        """First come, first served, at each partition. Returns who is served in this step, when, and how many each."""
        served: list[Ints] = []
        moments: list[Floats] = []
        counts = np.zeros_like(allowed)
        by_partition = np.argsort(where, kind="stable")
        borders = np.searchsorted(where[by_partition], np.arange(self.service.partitions + 1))
        for number, line in enumerate(self.lines):
            mine = by_partition[borders[number] : borders[number + 1]]
            left = int(allowed[number])
            while line and left:
                head = line.popleft()
                if head.size > left:
                    line.appendleft(head[left:])
                    head = head[:left]
                left -= head.size
                self.lined_up -= head.size
                served.append(head)
                moments.append(np.full(head.size, self.now))
            now = 0 if line else min(left, mine.size)
            served.append(slots[mine[:now]])
            moments.append(times[mine[:now]])
            late = mine[now:]
            if late.size and self.refuse:
                self.refused += late.size
                self._schedule(slots[late], times[late] + self._latencies(late.size), REFUSED)
            elif late.size:
                line.append(slots[late])
                self.lined_up += late.size
            counts[number] = allowed[number] - left + now
        return np.concatenate(served), np.concatenate(moments), counts

    def _answer(self, slots: Ints, times: Floats) -> None:
        if slots.size:
            self._schedule(slots, times + self._latencies(slots.size), ACCEPTED)

    def _latencies(self, count: int) -> Floats:
        service = self.service
        drawn = service.latency_s * np.exp(service.latency_sigma * self.random.standard_normal(count))
        slow = self.random.uniform(0, 1, count) < service.slow_share
        drawn[slow] += self.random.uniform(0.5, 1.5, int(slow.sum())) * service.slow_s
        return drawn

    def _schedule(self, slots: Ints, until: Floats, kind: int) -> None:
        # Only the first requests of all are sent within the step that schedules them.
        soonest = self.at_step + (0 if kind == ASK and not self.admitted else 1)
        when = np.maximum((until / self.step).astype(np.int64), soonest)
        order = np.argsort(when, kind="stable")
        when, slots, until = when[order], slots[order], until[order]
        borders = np.flatnonzero(np.diff(when)) + 1
        for group, moments, steps in zip(
            np.split(slots, borders), np.split(until, borders), np.split(when, borders), strict=True
        ):
            if group.size:
                self.calendar[int(steps[0])].append((group, moments, kind))
