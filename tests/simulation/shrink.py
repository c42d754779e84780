"""A violation made small: fewer actors, fewer steps, fewer decisions, for as long as it stays one of its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.simulation.actors import Actor
from tests.simulation.run import Outcome, run
from tests.simulation.scenarios import Scenario


def shrunk(found: Outcome, *, most_runs: int = 600, other_seeds: int = 12) -> Outcome:
    """A smaller run with a violation of the same kind. Greedy."""
    budget = [most_runs]

    def again(scenario: Scenario, decisions: Sequence[int] | None, seed: int) -> Outcome | None:
        if budget[0] <= 0:
            return None
        budget[0] -= 1
        made = run(seed, scenario, decisions)
        return made if made.kind == found.kind else None

    smaller = True
    while smaller:
        smaller = False
        for scenario in _simpler(found.scenario):
            made = again(scenario, found.decisions, found.seed)
            for seed in range(other_seeds):
                made = made or again(scenario, None, found.seed * 1000 + seed)
            if made is not None:
                found, smaller = made, True
                break
    size = max(len(found.decisions) // 2, 1)
    while size:
        at = 0
        while at < len(found.decisions):
            chunk = found.decisions[at : at + size]
            if any(chunk):
                tried = [*found.decisions[:at], *[0] * len(chunk), *found.decisions[at + size :]]
                found = again(found.scenario, tried, found.seed) or found
            at += size
        size //= 2
    return found


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    for at in range(len(scenario.actors)):
        yield replace(scenario, actors=scenario.actors[:at] + scenario.actors[at + 1 :])
    for at, actor in enumerate(scenario.actors):
        for step in range(len(actor.steps)):
            if len(actor.steps) > 1:
                yield _with(scenario, at, actor.with_steps(actor.steps[:step] + actor.steps[step + 1 :]))
        if actor.ranks > 1:
            yield _with(scenario, at, replace(actor, ranks=1))
        if any(actor.skews):
            yield _with(scenario, at, replace(actor, skews=(0.0,)))
    for at in range(len(scenario.setup)):
        yield replace(scenario, setup=scenario.setup[:at] + scenario.setup[at + 1 :])
    if scenario.page < 1000 or scenario.delete_page < 1000 or not scenario.lists_uploads:
        yield replace(scenario, page=1000, delete_page=1000, lists_uploads=True)


def _with(scenario: Scenario, at: int, actor: Actor) -> Scenario:
    return replace(scenario, actors=(*scenario.actors[:at], actor, *scenario.actors[at + 1 :]))


def told(outcome: Outcome, *, most: int = 120) -> str:
    """A run in words: its scenario, what the actors were told, its requests, and the verdict."""
    scenario = outcome.scenario
    lines = [f"seed {outcome.seed}, {scenario.family}: {outcome.violation}"]
    lines += [f"  before: {kind} {_given(given)}" for kind, given in scenario.setup]
    for actor in scenario.actors:
        skews = f", clocks off by {', '.join(f'{skew:.0f} s' for skew in actor.skews)}" if any(actor.skews) else ""
        lines.append(f"  {actor.name}, {actor.ranks} rank{'s' if actor.ranks > 1 else ''}{skews}:")
        lines += [f"    {kind} {_given(given)}" for kind, given in actor.steps]
    lines += [f"  {line}" for line in outcome.log]
    start = outcome.trace[0][0] if outcome.trace else 0.0
    shown = outcome.trace[-most:]
    if len(shown) < len(outcome.trace):
        lines.append(f"  ... {len(outcome.trace) - len(shown)} requests before")
    last: object = None
    for moment, op, name, key, what in shown:
        if op is not last:
            lines.append(f"  -- {op}")
        last = op
        lines.append(f"  {moment - start:10.2f} s  {name} {key}{'  <- ' + what if what else ''}")
    return "\n".join(lines)


def _given(given: dict[str, object]) -> str:
    return ", ".join(
        f"{name}={value}" if name != "policy" else f"policy=latest {value.keep.latest}, grace {value.prune.grace}"  # type: ignore[attr-defined]
        for name, value in given.items()
        if value is not None
    )
