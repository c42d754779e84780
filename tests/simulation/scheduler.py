"""One thread at a time: each request is a point at which a seed decides who goes on, and what becomes of the request.

Actors are processes of one thread or several, with clocks of their own. Simulated time passes with requests, and jumps
where everybody waits.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bucketpoint.errors import BucketpointError, CredentialsError, TransientStoreError

T = TypeVar("T")

START = 1_700_000_000.0
REQUEST_S = 0.05
CLIENT_TIMEOUT_S = 60.0
SKEWED_S = 900.0
"""S3 refuses a request whose time is further from its own (RequestTimeTooSkewed)."""

LONG_S = (60.0, 600.0, 1700.0, 3700.0, 7200.0, 3 * 86400.0)
SHORT_S = (5.0, 60.0, 300.0, 600.0, 840.0, 1500.0)

FAULTS = ("none", "suspend", "kill", "kill after", "lose request", "lose answer", "delay", "zombie", "suspend before")

# The pieces of `threading` that are real even while the product's are replaced.
_Lock = threading.Lock
_Thread = threading.Thread
_get_ident = threading.get_ident


class KilledError(BaseException):
    """The process is gone: nothing catches it on the way."""


class StuckError(Exception):
    """A fault of the simulator: nobody can go on."""


@dataclass(frozen=True)
class Chances:
    """How often what happens at a request. `faults` are relative weights of `FAULTS[1:]`."""

    switch: float = 0.3
    fault: float = 0.02
    faults: tuple[float, ...] = (4, 1, 1, 1, 1, 1, 1, 0)


class Decisions:
    """A seed's decisions, in order, so that they can be taken again, and fewer of them."""

    def __init__(self, seed: int, chances: Chances, replay: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed)
        self._chances = chances
        self._replay = replay
        self.taken: list[int] = []
        self._faults = list(range(1, len(FAULTS)))

    def who(self, count: int) -> int:
        """Of `count` who could go on; 0 is whoever is at it."""
        if self._replay is not None:
            return min(self._next(), count - 1)
        choice = self._random.randrange(count) if self._random.random() < self._chances.switch else 0
        self.taken.append(choice)
        return choice

    def fault(self) -> tuple[str, int]:
        """What happens to a request, and how badly, from 0 to 5."""
        if self._replay is not None:
            choice = self._next()
        elif self._random.random() < self._chances.fault:
            kind = self._random.choices(self._faults, self._chances.faults)[0]
            choice = kind * 8 + self._random.randrange(6)
        else:
            choice = 0
        if self._replay is None:
            self.taken.append(choice)
        kind, much = divmod(choice, 8)
        return FAULTS[min(kind, len(FAULTS) - 1)], min(much, 5)

    def _next(self) -> int:
        assert self._replay is not None
        at = len(self.taken)
        choice = self._replay[at] if at < len(self._replay) else 0
        self.taken.append(choice)
        return choice


@dataclass(eq=False)
class Process:
    """What is killed and suspended as a whole. `skew` is how far its clock is ahead, before it `jumps`."""

    name: str
    skew: float = 0.0
    jumps: tuple[tuple[float, float], ...] = ()
    """When its clock is set, in seconds from the start, and by how much."""
    signs: bool = True
    """Whether its requests carry the time of its clock; else they carry the true one."""
    dead: bool = False
    wakes: float = 0.0
    spared: bool = False
    """Whether nothing ever happens to it."""

    def clock(self, now: float) -> float:
        return now + self.skew + sum(by for at, by in self.jumps if now - START >= at)


@dataclass(eq=False)
class Task:
    """One thread of a process. `op` is what it does at the moment, for the oracle and the trace."""

    process: Process
    name: str
    run: Callable[[], Any]
    op: Any = None
    ready: float = 0.0
    until: Callable[[], bool] | None = None
    gives_up: float = float("inf")
    ended: bool = False
    error: BaseException | None = None
    async_save: Any = None
    """What stands in for the product's on this thread."""
    baton: Any = field(default_factory=_Lock)

    def can_run(self, now: float) -> bool:
        if self.process.wakes > now or self.ready > now:
            return False
        return self.until is None or now >= self.gives_up or self.until()


class Scheduler:
    """Runs tasks one at a time. Everything in it is only ever touched by the one that has the baton."""

    def __init__(self, decisions: Decisions, *, seed: int = 0, most_requests: int = 4000) -> None:
        self.now = START
        self.random = random.Random(seed)
        self.view: Any = None
        self.decisions = decisions
        self.tasks: list[Task] = []
        self.trace: list[tuple[float, Any, str, str, str]] = []
        self.problem: BaseException | None = None
        self.quiet = False
        """No faults and no scheduling: for what comes before and after."""
        self.requests = 0
        self._most = most_requests
        self._in_flight: list[tuple[float, int, Callable[[], None]]] = []
        self._done = _Lock()
        self._threads: list[Any] = []
        self._running = False

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def spawn(self, process: Process, name: str, run: Callable[[], Any], op: Any = None) -> Task:
        task = Task(process, name, run, op)
        task.baton.acquire()
        self.tasks.append(task)
        thread = _Thread(target=self._work, args=(task,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return task

    def run(self) -> None:
        """Until every task has ended. Raises what went wrong, and `StuckError`."""
        self._done.acquire()
        first = self._pick(None)
        if first is not None:
            first.baton.release()
            self._done.acquire()
        self._done.release()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.tasks.clear()
        self._done = _Lock()

    def stop(self, problem: BaseException) -> None:
        """End the whole run: everybody is killed where he stands."""
        if self.problem is None:
            self.problem = problem
        for task in self.tasks:
            task.process.dead = True

    def _work(self, task: Task) -> None:
        task.baton.acquire()
        _tasks[_get_ident()] = (self, task)
        try:
            if not task.process.dead:
                task.run()
        except BaseException as error:  # noqa: BLE001 (looked at by whoever waits for the task)
            task.error = error
        finally:
            task.ended = True
            try:
                following = self._pick(None)
            except BaseException as error:  # noqa: BLE001
                self.stop(error)
                following = self._pick(None)
            del _tasks[_get_ident()]
            (following.baton if following is not None else self._done).release()

    # -- who goes on ---------------------------------------------------------------------------------------------------

    def _pick(self, current: Task | None) -> Task | None:
        while True:
            alive = [task for task in self.tasks if not task.ended]
            if not alive:
                return None
            for task in alive:
                if task.process.dead:
                    return task
            self._arrive()
            now = self.now
            ready = [task for task in alive if task.can_run(now)]
            if ready:
                if len(ready) == 1:
                    return ready[0]
                if current in ready:
                    ready.remove(current)
                    ready.insert(0, current)
                return ready[self.decisions.who(len(ready))]
            self._jump(alive)

    def _jump(self, alive: list[Task]) -> None:
        times = [arrival for arrival, _, _ in self._in_flight]
        for task in alive:
            at = max(task.process.wakes, task.ready)
            if task.until is not None and at <= self.now:
                at = task.gives_up
            times.append(at)
        times = [time for time in times if time > self.now]
        if not times or min(times) == float("inf"):
            self.stop(StuckError("everybody waits for somebody else"))
            return
        self.now = min(times)

    def _arrive(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self.now:
            self._in_flight.pop(0)[2]()

    def finish_late(self) -> None:
        """Whatever is still on its way arrives, each at its time, or is refused for its age."""
        while self._in_flight:
            self.now = max(self.now, self._in_flight[0][0])
            self._arrive()

    def switch(self, task: Task) -> None:
        """Let the seed decide who goes on. Returns when it is this task's turn."""
        following = self._pick(task)
        if following is not task:
            assert following is not None
            following.baton.release()
            task.baton.acquire()
        if task.process.dead:
            raise KilledError()

    def sleep(self, task: Task, seconds: float) -> None:
        if task.process.dead:
            raise KilledError()
        task.ready = self.now + max(seconds, 0.0)
        self.switch(task)

    def wait(self, task: Task, until: Callable[[], bool], seconds: float = float("inf")) -> bool:
        """Whether it came to be within so many seconds."""
        if task.process.dead:
            raise KilledError()
        task.until, task.gives_up = until, self.now + seconds
        try:
            self.switch(task)
        finally:
            task.until, task.gives_up = None, float("inf")
        return until()

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, task: Task, name: str, key: str, act: Callable[[Any], T]) -> T:
        """One attempt of one request. `act` gets what the task does, and acts on the store at once."""
        process = task.process
        if process.dead:
            raise KilledError()
        if self.quiet:
            self.now += REQUEST_S
            return self._act(task.op, name, key, act)
        fault, much = ("none", 0) if process.spared else self.decisions.fault()
        if fault == "suspend before":
            process.wakes = self.now + LONG_S[much]
        signed = self.signed(process)
        if fault == "suspend before":
            signed += process.wakes - self.now
        self.switch(task)
        self.requests += 1
        if self.requests > self._most:
            self.stop(StuckError("too many requests"))
            raise KilledError()
        self.now += REQUEST_S
        op = task.op
        if fault == "delay":
            task.ready = self.now + SHORT_S[much]
            self.switch(task)
        if fault in ("kill", "lose request"):
            self._note(op, name, key, f"{fault}: never arrived")
            if fault == "kill":
                self._kill(process)
            self._give_up(task)
        if fault == "zombie":
            arrival = self.now + SHORT_S[much]

            def arrive() -> None:
                # Nobody gets the answer.
                with contextlib.suppress(Exception, KilledError):
                    self._act(op, name, key, act, late=True, signed=signed)

            self._note(op, name, key, f"nobody answers; it arrives {SHORT_S[much]:.0f} s later")
            self._in_flight.append((arrival, len(self.trace), arrive))
            self._in_flight.sort(key=lambda one: one[:2])
            self._give_up(task)
        try:
            return self._act(op, name, key, act, signed=signed, note="" if fault in ("none", "suspend") else fault)
        finally:
            if self.problem is not None:
                process.dead = True
            elif fault == "suspend":
                self._note(op, "-", "", f"suspended for {LONG_S[much]:.0f} s")
                process.wakes = self.now + LONG_S[much]
                self.switch(task)
            elif fault == "kill after":
                self._kill(process)
                raise KilledError()
            elif fault == "lose answer":
                self._give_up(task)

    def signed(self, process: Process) -> float:
        """The time that a request carries which is signed now."""
        return process.clock(self.now) if process.signs else self.now

    def _give_up(self, task: Task) -> None:
        task.ready = self.now + CLIENT_TIMEOUT_S
        self.switch(task)
        raise TransientStoreError("the store did not answer")

    def _kill(self, process: Process) -> None:
        process.dead = True
        self._note(process.name, "-", "", "killed")
        raise KilledError()

    def _act(
        self,
        op: Any,
        name: str,
        key: str,
        act: Callable[[Any], T],
        *,
        late: bool = False,
        signed: float | None = None,
        note: str = "",
    ) -> T:
        said = f"{note} (late) " if late else f"{note} " if note else ""
        if signed is not None and abs(self.now - signed) > SKEWED_S:
            self._note(op, name, key, said + "RequestTimeTooSkewed")
            raise CredentialsError("RequestTimeTooSkewed: the request's time is too far from the store's")
        at = len(self.trace)
        self._note(op, name, key, said)
        try:
            return act(op)
        except Exception as error:
            self.trace[at] = (*self.trace[at][:4], said + type(error).__name__)
            if isinstance(error, BucketpointError):
                raise
            # A judge's word, or a fault of the simulator: nothing of the product may swallow it.
            self.stop(error)
            raise KilledError() from error

    def _note(self, op: Any, name: str, key: str, what: str) -> None:
        self.trace.append((self.now, op, name, key, what))


_tasks: dict[int, tuple[Scheduler, Task]] = {}


def here() -> tuple[Scheduler, Task] | None:
    """The simulated thread that this is, if it is one."""
    return _tasks.get(_get_ident())
