"""One run of the simulation: set up, the actors at work, thirty days later the last prune and sweep, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.actors import Actor, Running, Step, World
from tests.simulation.bucket import Bucket, View
from tests.simulation.facts import ViolationError
from tests.simulation.oracle import Oracle
from tests.simulation.patches import forget
from tests.simulation.scenarios import Scenario, scenario
from tests.simulation.scheduler import Decisions, KilledError, Scheduler

LATER_S = 30 * 86400.0


@dataclass
class Outcome:
    """What came of one run."""

    seed: int
    scenario: Scenario
    violation: BaseException | None
    decisions: list[int]
    requests: int
    trace: list[tuple[float, Any, str, str, str]] = field(repr=False)
    log: list[str] = field(repr=False)

    @property
    def kind(self) -> str:
        """What is grouped by."""
        found = self.violation
        if found is None:
            return ""
        if isinstance(found, ViolationError):
            return found.kind
        return f"fault: {type(found).__name__}"


def run(seed: int, given: Scenario | None = None, replay: Sequence[int] | None = None, only: str = "") -> Outcome:
    """Run the scenario of a seed, or another one with its chances; with `replay` decisions are taken again."""
    forget()
    made = given if given is not None else scenario(seed, only)
    decisions = Decisions(seed, made.chances, replay)
    scheduler = Scheduler(decisions, seed=seed)
    bucket = Bucket(
        lambda: scheduler.now,
        page=made.page,
        delete_page=made.delete_page,
        conditional_delete=made.conditional_delete,
        expiring_delete=made.expiring_delete,
        lists_uploads=made.lists_uploads,
        copies_inside=made.copies_inside,
        dates_writes=made.dates_writes,
    )
    oracle = Oracle(bucket)
    bucket.changed, bucket.listed = oracle.changed, oracle.listed
    view = scheduler.view = View(bucket)
    world = World(scheduler, bucket, oracle, view)

    def go(*actors: Actor, quiet: bool) -> list[Running]:
        scheduler.quiet = quiet
        running = [Running(world, actor) for actor in actors]
        for one in running:
            one.start()
        tasks = list(scheduler.tasks)
        scheduler.run()
        for task in tasks:
            if task.error is not None and not isinstance(task.error, KilledError):
                scheduler.problem = scheduler.problem or task.error
        return running

    go(Actor("setup", made.setup, spared=True), quiet=True)
    scheduler.trace.clear()
    world.log.clear()
    if scheduler.problem is None:
        go(*made.actors, quiet=False)
    requests = scheduler.requests
    if scheduler.problem is None:
        scheduler.finish_late()
        scheduler.now += LATER_S
    if scheduler.problem is None:
        steps: list[Step] = []
        # Inner runs first: what lies above them may go with them.
        for root in sorted(made.roots, key=len, reverse=True):
            for _ in range(2):
                if made.policy is not None and root == made.roots[0]:
                    steps.append(("prune", {"root": root, "policy": made.policy}))
                steps.append(("sleep", {"seconds": 7 * 86400.0}))
                steps.append(("sweep", {"root": root, "older_than": 48 * 3600.0, "deep": True}))
        go(Actor("the end", tuple(steps), spared=True), quiet=True)
    if scheduler.problem is None:
        try:
            oracle.at_the_end()
        except ViolationError as violation:
            scheduler.problem = violation
    return Outcome(seed, made, scheduler.problem, decisions.taken, requests, scheduler.trace, world.log)
