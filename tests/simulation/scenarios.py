"""Which actors meet: families that aim at what is rare, and a mix of everything. A seed decides on all numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any

from tests.simulation.actors import Actor, Step
from tests.simulation.scheduler import Chances

from bucketpoint.retention import Best, EverySteps, Keep, MaxDelete, Prune, RetentionPolicy

RUN = "run"
INNER = "run/step-100/finetune"
OWN_FOLDER = "run/step-100"
NEIGHBOUR = "run-2"


@dataclass(frozen=True)
class Scenario:
    """What one run of the simulation begins with."""

    family: str
    setup: tuple[Step, ...]
    actors: tuple[Actor, ...]
    roots: tuple[str, ...] = (RUN,)
    chances: Chances = field(default_factory=Chances)
    page: int = 4
    delete_page: int = 1000
    conditional_delete: bool = True
    expiring_delete: bool = False
    lists_uploads: bool = True
    copies_inside: bool = False
    dates_writes: bool = True
    policy: RetentionPolicy | None = None


@cache
def policy(
    latest: int = 2, grace: float = 0.0, *, thin: int = 0, best: int = 0, debris: float = 48 * 3600.0
) -> RetentionPolicy:
    every = (EverySteps(steps=thin, thin="weights"),) if thin else ()
    return RetentionPolicy(
        keep=Keep(latest=latest, every=every, best=(Best("loss", "min", best),) if best else ()),
        prune=Prune(
            grace=timedelta(seconds=grace),
            debris_after=timedelta(seconds=debris),
            max_delete=MaxDelete(count=100, fraction=1.0),
        ),
    )


def _saves(root: str, *steps: int, how: str = "log", **given: Any) -> tuple[Step, ...]:
    return tuple(("save", {"root": root, "step": step, "how": how, **given}) for step in steps)


def _save(root: str, step: int, **given: Any) -> Step:
    return "save", {"root": root, "step": step, **given}


def _prune(rule: RetentionPolicy, root: str = RUN) -> Step:
    return "prune", {"root": root, "policy": rule}


def _sweep(older_than: float = 48 * 3600.0, *, deep: bool = False, root: str = RUN) -> Step:
    return "sweep", {"root": root, "older_than": older_than, "deep": deep}


def _sleep(seconds: float) -> Step:
    return "sleep", {"seconds": seconds}


def _skew(rng: random.Random) -> float:
    return rng.choice([0.0, 0.0, 0.0, rng.uniform(-600, 600)])


def _skews(rng: random.Random, ranks: int = 1) -> tuple[float, ...]:
    return tuple(_skew(rng) for _ in range(ranks))


def _how(rng: random.Random, rule: RetentionPolicy) -> dict[str, Any]:
    """How a job saves: without a catalog, with one, with one and a policy."""
    return rng.choice(
        [
            {"how": "plain"},
            {"how": "log"},
            {"how": "retention", "policy": rule},
            {"how": "log", "policy": rule},
        ]
    )


def _rule(rng: random.Random) -> RetentionPolicy:
    return policy(
        rng.choice([1, 2, 3]), rng.choice([0.0, 0.0, 3600.0, 86400.0]), thin=rng.choice([0, 0, 100]),
        debris=rng.choice([48 * 3600.0, 3600.0]),
    )  # fmt: skip


# -- families ----------------------------------------------------------------------------------------------------------


def plain_over_due(rng: random.Random) -> Scenario:
    """Somebody saves without a catalog over a step that a policy is about to delete, or to thin."""
    rule = policy(1, rng.choice([0.0, 60.0]), thin=rng.choice([0, 0, 200]))
    saver = Actor("saver", (_sleep(rng.choice([0.0, 60.0])), _save(RUN, 200)), rng.choice([1, 1, 2]), _skews(rng, 2))
    pruner = Actor("pruner", (_prune(rule), _sleep(120.0), _prune(rule)), skews=_skews(rng))
    return Scenario("plain over due", _saves(RUN, 100, 200, 300), (saver, pruner), policy=rule)


def nested(rng: random.Random) -> Scenario:
    """A run within a step that goes."""
    inner = rng.choice([INNER, OWN_FOLDER])
    rule = policy(1, rng.choice([0.0, 60.0]), thin=rng.choice([0, 0, 100]))
    how: dict[str, Any] = rng.choice([{}, {"how": "log"}, {"how": "retention", "policy": policy(2, 0.0)}])
    setup = _saves(RUN, 100, 200, 300)
    if rng.random() < 0.3:
        setup += _saves(inner, 1, how=rng.choice(["plain", "log"]))
    tuner = Actor("tuner", (_save(inner, 2, **how), _save(inner, 3, **how)), rng.choice([1, 1, 2]), _skews(rng, 2))
    pruner = Actor("pruner", (_prune(rule), _sleep(120.0), _prune(rule)), skews=_skews(rng))
    return Scenario("nested", setup, (tuner, pruner), (RUN, inner), policy=rule)


def asleep(rng: random.Random) -> Scenario:
    """A pruner that is suspended, and a job that saves the same step again meanwhile."""
    rule = policy(1, 0.0, thin=rng.choice([0, 0, 0, 200]))
    how = _how(rng, rule)
    saver = Actor("saver", (_sleep(rng.choice([0.0, 2.0])), _save(RUN, rng.choice([100, 200]), **how)), 1, _skews(rng))
    pruners = tuple(
        Actor(f"pruner-{n}", (_prune(rule), _sleep(rng.choice([60.0, 1000.0])), _prune(rule)), skews=_skews(rng))
        for n in range(rng.choice([1, 2]))
    )
    chances = Chances(0.3, 0.05, (8, 0, 0, 0, 1, 1, 1, 0))
    return Scenario("asleep", _saves(RUN, 100, 200, 300), (saver, *pruners), policy=rule, chances=chances)


def unheard(rng: random.Random) -> Scenario:
    """A save that commits when it is no longer the newest, and does not hear of it: a pruner may be faster."""
    rule = policy(1, 0.0, thin=rng.choice([0, 0, 0, 200]))
    slow = rng.choice([0.0, 5000.0])
    saver = Actor(
        "saver", (_save(RUN, 100, how="log", slow=slow, slow_end=True),), rng.choice([1, 1, 2]), (-100.0, 0.0)
    )
    prunes = (_prune(rule), _sleep(15.0)) * 7
    pruners = tuple(
        Actor(name, (_sleep(slow + rng.choice([2.0, 10.0, 30.0])), *prunes)) for name in ("first", "second")
    )
    chances = Chances(0.3, 0.02, (0, 0, 0, 0, 1, 0, 2, 0))
    newer = Actor("newer", (_sleep(slow + 0.5), _save(RUN, 400, how="log")))
    return Scenario("unheard", _saves(RUN, 200, 300), (saver, newer, *pruners), policy=rule, chances=chances)


def held(rng: random.Random) -> Scenario:
    """A pruner that is suspended, another that takes over once its lock has expired, and a person who pins."""
    rule = policy(1, 0.0, thin=rng.choice([0, 0, 0, 200]))
    first = Actor("pruner-1", (_prune(rule),), skews=_skews(rng))
    second = Actor("pruner-2", (_sleep(rng.choice([905.0, 1000.0, 1600.0])), _prune(rule)), skews=_skews(rng))
    step = {"root": RUN, "step": 200}
    wants: list[Step] = [("pin", step), ("pin", step), ("load", {**step, "seconds": 3600}), ("undo", step)]
    pause = rng.choice([0.0, 905.0, 1000.0, 1000.3, 1000.6])
    keeper = Actor("keeper", (_sleep(pause), rng.choice(wants), _sleep(1.0), rng.choice(wants)), skews=_skews(rng))
    chances = Chances(rng.choice([0.5, 0.9]), 0.06, (2, 0, 0, 0, 0, 0, 0, 8))
    return Scenario("held", _saves(RUN, 200, 300), (first, second, keeper), policy=rule, chances=chances)


def alone(rng: random.Random) -> Scenario:
    """Saves without collectives, and a sweep that looks everywhere."""
    rule = policy(2, 0.0)
    given = {"how": "plain", "collectives": False}
    saver = Actor("saver", (_save(RUN, 300, **given), _save(RUN, 400, **given)), rng.choice([1, 2]), _skews(rng, 2))
    sweeper = Actor("sweeper", (_sweep(rng.choice([0.0, 3600.0, 48 * 3600.0]), deep=True),), skews=_skews(rng))
    setup = (*_saves(RUN, 100), _save(RUN, 200, **given), _sleep(rng.choice([0.0, 3 * 86400.0])))
    return Scenario("alone", setup, (saver, sweeper), policy=rule)


def long_save(rng: random.Random) -> Scenario:
    """A save that lasts longer than the age from which a sweep takes attempts to be dead."""
    rule = policy(2, 0.0, debris=rng.choice([3600.0, 3600.0, 7200.0]))
    how = _how(rng, rule)
    slow = rng.choice([120.0, 1700.0, 3500.0, 3700.0, 5400.0, 7300.0, 4 * 86400.0])
    ranks = rng.choice([1, 2])
    alone = {"collectives": False} if how["how"] == "plain" and rng.random() < 0.3 else {}
    saves = (_save(RUN, 200, slow=slow, slow_end=rng.random() < 0.7, **alone, **how), _save(RUN, 300, **how))
    saver = Actor("saver", saves[: rng.choice([1, 2])], ranks, _skews(rng, 2))
    older = rng.choice([0.0, 3600.0, 3600.0, 3600.0, 7200.0])
    step = _sweep(older, deep=rng.random() < 0.8)
    waits = [_sleep(rng.choice([1.0, 60.0, slow - older, slow - 60.0, slow - 1.0, slow, 3700.0])) for _ in range(3)]
    sweeps = tuple(part for wait in waits for part in (wait, step))
    sweepers = [Actor("sweeper", sweeps, skews=_skews(rng))]
    if rng.random() < 0.3:
        sweepers.append(Actor("sweeper-2", sweeps, skews=_skews(rng)))
    chances = Chances(rng.choice([0.3, 0.7]), rng.choice([0.0, 0.02, 0.06]), (6, 1, 0, 0, 1, 1, 1, 0))
    setup = _saves(RUN, *rng.choice([(100,), (100, 200)]))
    return Scenario("long save", setup, (saver, *sweepers), policy=rule, chances=chances)


def copies(rng: random.Random) -> Scenario:
    """A copy, or a conversion, over a step that another job saves to."""
    rule = policy(3, 0.0)
    kind = rng.choice(["cp", "convert"])
    target = rng.choice([f"{RUN}/step-200", f"{NEIGHBOUR}/step-200"])
    given = {"source": f"{RUN}/step-100", "target": target, "overwrite": True}
    copier = Actor("copier", ((kind, given),), skews=_skews(rng))
    how = _how(rng, rule)
    saver = Actor("saver", (_save(target.partition("/")[0], 200, **how),), rng.choice([1, 2]), _skews(rng, 2))
    setup = _saves(RUN, 100, 300) + (_saves(target.partition("/")[0], 200) if rng.random() < 0.5 else ())
    return Scenario("copies", setup, (copier, saver), (RUN, NEIGHBOUR), policy=rule, copies_inside=rng.random() < 0.3)


def newest_gone(rng: random.Random) -> Scenario:
    """The data of the newest checkpoint is gone, by hand."""
    rule = policy(rng.choice([1, 2]), rng.choice([0.0, 60.0]))
    how = rng.choice(["log", "plain"])
    gone: Step = ("remove", {"root": RUN, "step": 300, "only": "data/"})
    person = Actor("person", (_sleep(rng.choice([0.0, 0.5])), gone))
    pruner = Actor("pruner", (_sleep(1.0), _prune(rule), _sleep(120.0), _prune(rule)), skews=_skews(rng))
    setup = _saves(RUN, 100, 200, 300, how=how)
    if how == "plain":
        setup += (("adopt", {"root": RUN}),)
    return Scenario("newest gone", setup, (person, pruner), policy=rule)


def going_on(rng: random.Random) -> Scenario:
    """Jobs that go on over damaged checkpoints, or roll back, one after another: the one before may still wake up."""
    rule = policy(rng.choice([1, 2]), rng.choice([0.0, 60.0, 3600.0]))

    def job(name: str, pause: float) -> Actor:
        back = {"which": 100, "rollback": True} if rng.random() < 0.3 else {}
        how = {"how": "manager", "policy": rule, "overwrite": False}
        steps = rng.choice([(200, 300), (250, 300), (200,), (400,)])
        saves = tuple(part for step in steps for part in (_save(RUN, step, **how), _sleep(rng.choice([1.0, 100.0]))))
        return Actor(name, (_sleep(pause), ("restore", {"root": RUN, "policy": rule, **back}), *saves), 1, _skews(rng))

    steps = rng.sample([100, 200, 300], rng.choice([0, 1, 2]))
    person = Actor("person", tuple(("remove", {"root": RUN, "step": step, "only": "data/"}) for step in steps))
    jobs = (job("job-1", 1.0), job("job-2", rng.choice([1.0, 200.0, 4000.0])))
    keeper: tuple[Step, ...] = (("pin", {"root": RUN, "step": rng.choice([200, 300])}), _sleep(50.0), _prune(rule))
    others = (Actor("keeper", keeper, skews=_skews(rng)),) if rng.random() < 0.4 else ()
    pruner = Actor("pruner", (_sleep(rng.choice([2.0, 150.0])), _prune(rule)), skews=_skews(rng))
    chances = Chances(rng.choice([0.2, 0.6]), rng.choice([0.01, 0.05]), (4, 1, 1, 0, 1, 1, 1, 0))
    setup = _saves(RUN, 100, 200, 300)
    return Scenario("going on", setup, (person, *jobs, pruner, *others), policy=rule, chances=chances)


def changed_mind(rng: random.Random) -> Scenario:
    """Policies that change during the grace, values that come late, and pruners that do not agree."""

    def rule() -> RetentionPolicy:
        grace = rng.choice([0.0, 60.0, 60.0, 3600.0])
        return policy(rng.choice([1, 1, 2, 3]), grace, thin=rng.choice([0, 0, 200]), best=rng.choice([0, 1, 1]))

    def prunes() -> tuple[Step, ...]:
        waits = (_sleep(rng.choice([1.0, 30.0, 61.0, 61.0, 1000.0])) for _ in range(3))
        return tuple(part for wait in waits for part in (wait, _prune(rule())))

    reports = tuple(
        part
        for step in rng.sample([100, 200, 300], rng.choice([0, 1, 2, 3]))
        for part in (
            _sleep(rng.choice([0.0, 5.0, 40.0, 100.0])),
            ("report", {"root": RUN, "step": step, "value": rng.random()}),
        )
    )
    actors = [Actor("evaluator", reports), Actor("pruner-1", prunes(), skews=_skews(rng))]
    if rng.random() < 0.5:
        actors.append(Actor("pruner-2", prunes(), skews=_skews(rng)))
    mine = rule()
    kind = rng.randrange(4)
    if kind == 0:
        steps = (_sleep(rng.choice([1.0, 70.0])), _save(RUN, rng.choice([100, 200, 400]), **_how(rng, mine)))
        actors.append(Actor("saver", steps, rng.choice([1, 1, 2]), _skews(rng, 2)))
    elif kind == 1:
        back = ("restore", {"root": RUN, "policy": mine, "which": rng.choice([100, 200]), "rollback": True})
        save = _save(RUN, rng.choice([250, 400]), how="manager", policy=mine, overwrite=False)
        actors.append(Actor("job", (_sleep(rng.choice([1.0, 70.0])), back, save), 1, _skews(rng)))
    elif kind == 2:
        step = {"root": RUN, "step": rng.choice([100, 200])}
        wants: list[Step] = [("pin", step), ("load", {**step, "seconds": 3600}), ("undo", step)]
        actors.append(Actor("keeper", (_sleep(rng.choice([1.0, 65.0, 1000.0])), rng.choice(wants)), skews=_skews(rng)))
    chances = Chances(rng.choice([0.2, 0.6]), rng.choice([0.0, 0.02, 0.05]), (5, 1, 1, 0, 1, 1, 1, 0))
    setup = (*_saves(RUN, 100, 200, 300), _prune(policy(1, 60.0)))
    return Scenario("changed mind", setup, tuple(actors), policy=mine, chances=chances)


def removed(rng: random.Random) -> Scenario:
    """A person or a lifecycle rule removes checkpoints: their records must not count."""
    grace = rng.choice([0.0, 0.0, 60.0])
    rule = policy(rng.choice([1, 2]), grace, best=rng.choice([0, 1]), thin=rng.choice([0, 0, 200]))
    steps = rng.sample([100, 200, 300, 400], rng.choice([1, 2, 3]))
    person = Actor(
        "person",
        tuple(
            part
            for step in steps
            for part in (
                ("remove", {"root": RUN, "step": step, "only": rng.choice(["", "", ".metadata"])}),
                _sleep(rng.choice([0.0, 1.0, 70.0])),
            )
        ),
    )
    waits = [_sleep(rng.choice([1.0, 2.0, 70.0])) for _ in range(3)]
    pruner = Actor("pruner", tuple(part for wait in waits for part in (wait, _prune(rule))))
    others = [step for step in (100, 200, 300, 400) if step not in steps]
    save = _save(RUN, rng.choice([500, *others]), **_how(rng, rule))
    saver = Actor("saver", (_sleep(rng.choice([1.0, 80.0])), save))
    setup = _saves(RUN, 100, 200, 300, 400)
    setup += tuple(("report", {"root": RUN, "step": step, "value": rng.random()}) for step in (100, 200, 300, 400))
    chances = Chances(0.3, rng.choice([0.0, 0.02]))
    return Scenario("removed", setup, (person, pruner, saver), policy=rule, chances=chances)


def measured_again(rng: random.Random) -> Scenario:
    """Steps are saved again, and may be measured again: what was measured of the commit before must not rank them."""
    rule = policy(1, rng.choice([0.0, 0.0, 60.0]), best=1)
    again = rng.choice([200, 300])
    saves: tuple[Step, ...] = (_save(RUN, again, how="log"),)
    if rng.random() < 0.3:
        saves += (("report", {"root": RUN, "step": again, "value": rng.random()}),)
    saver = Actor("saver", saves)
    waits = [_sleep(rng.choice([1.0, 30.0, 70.0])) for _ in range(2)]
    pruner = Actor("pruner", tuple(part for wait in waits for part in (wait, _prune(rule))))
    setup = _saves(RUN, 100, 200, 300, 400)
    setup += tuple(("report", {"root": RUN, "step": step, "value": rng.random()}) for step in (100, 200, 300))
    return Scenario(
        "measured again", setup, (saver, pruner), policy=rule, chances=Chances(0.2, rng.choice([0.0, 0.01]))
    )


def wrong_clocks(rng: random.Random) -> Scenario:
    """Readers with leases, a slow save, graces: beside pruners and sweepers whose clocks are wrong by days."""
    rule = policy(rng.choice([1, 2]), rng.choice([0.0, 3600.0, 86400.0]), debris=3600.0)
    slow = rng.choice([0.0, 1700.0, 3500.0, 3700.0])
    how = rng.choice([{"how": "plain"}, {"how": "log"}])
    saver = Actor("saver", (_save(RUN, 400, slow=slow, slow_end=rng.random() < 0.7, **how),), rng.choice([1, 2]))
    reader = Actor("reader", (_sleep(rng.choice([0.0, 50.0])), ("load", {"root": RUN, "step": rng.choice([100, 200])})))
    waits = [_sleep(rng.choice([1.0, 60.0, slow, 3601.0])) for _ in range(3)]
    pruner = Actor("pruner", tuple(part for wait in waits for part in (wait, _prune(rule))))
    sweep = _sweep(3600.0, deep=rng.random() < 0.7)
    sweeper = Actor("sweeper", tuple(part for wait in waits for part in (wait, sweep)))
    chances = Chances(rng.choice([0.3, 0.7]), rng.choice([0.0, 0.02]), (4, 1, 1, 1, 1, 1, 1, 0))
    setup = _saves(RUN, 100, 200, 300)
    return Scenario("wrong clocks", setup, (saver, reader, pruner, sweeper), policy=rule, chances=chances)


def loads(rng: random.Random) -> Scenario:
    """Ranks that load together, beside jobs that commit and prune."""
    rule = policy(rng.choice([1, 2]), rng.choice([0.0, 60.0]))
    step = rng.choice([None, 300, 300])
    load = ("load_together", {"root": RUN, "step": step})
    loader = Actor("loader", (_sleep(rng.choice([0.0, 0.3, 1.0])), load, _sleep(1.0), load), rng.choice([2, 3]))
    save = _save(RUN, rng.choice([step or 400, 400]), **_how(rng, rule))
    saver = Actor("saver", (save, *((save,) if rng.random() < 0.5 else ())), rng.choice([1, 1, 2]), _skews(rng, 2))
    pruner = Actor("pruner", (_sleep(rng.choice([0.5, 1.5])), _prune(rule), _sleep(60.0), _prune(rule)))
    chances = Chances(rng.choice([0.3, 0.7]), rng.choice([0.0, 0.02]))
    return Scenario("loads", _saves(RUN, 100, 200, 300), (loader, saver, pruner), policy=rule, chances=chances)


def ended(rng: random.Random) -> Scenario:
    """Ranks whose process group ends before their save does, so that each of them plans alone."""
    rule = policy(rng.choice([1, 2]), rng.choice([0.0, 60.0]))
    given = {"how": rng.choice(["plain", "log"]), "ended": True}
    job = Actor("job", (_save(RUN, 400, how="log"), _save(RUN, rng.choice([400, 500]), **given)), 2, _skews(rng, 2))
    pruner = Actor("pruner", (_sleep(rng.choice([1.0, 2.0])), _prune(rule), _sleep(60.0), _prune(rule)))
    return Scenario("ended", _saves(RUN, 100, 200, 300), (job, pruner), policy=rule)


def refused(rng: random.Random) -> Scenario:
    """A store that refuses reads of a checkpoint for a while: jobs go on, and a pruner comes by."""
    rule = policy(rng.choice([1, 2]), rng.choice([0.0, 60.0]))
    step = rng.choice([200, 300, 300])
    below = rng.choice(["/data/", "/data/", "/.metadata", "/", ""])
    status, code = rng.choice(
        [(403, "InvalidObjectState"), (403, "AccessDenied"), (409, "BlobArchived"), (503, "SlowDown"), (403, "")]
    )
    refusal = {"seconds": rng.choice([30.0, 300.0, 3600.0, 86400.0]), "status": status, "code": code}
    person = Actor(
        "person", (_sleep(rng.choice([0.0, 1.0])), ("refuse", {"prefix": f"{RUN}/step-{step}{below}", **refusal}))
    )

    def job(name: str, pause: float) -> Actor:
        save = _save(RUN, rng.choice([300, 400]), how="manager", policy=rule, overwrite=False)
        return Actor(name, (_sleep(pause), ("restore", {"root": RUN, "policy": rule}), save, save), 1, _skews(rng))

    jobs = (job("job-1", 1.5), job("job-2", rng.choice([20.0, 400.0, 4000.0])))
    pruner = Actor("pruner", (_sleep(rng.choice([2.0, 100.0])), _prune(rule), _sleep(200.0), _prune(rule)))
    reader = Actor("reader", (_sleep(2.0), ("load", {"root": RUN, "step": step})))
    chances = Chances(0.3, rng.choice([0.0, 0.02]))
    return Scenario(
        "refused", _saves(RUN, 100, 200, 300), (person, *jobs, pruner, reader), policy=rule, chances=chances
    )


def mixture(rng: random.Random) -> Scenario:
    """Everybody at once."""
    rule = _rule(rng)
    how = _how(rng, rule)
    steps = [100, 200, 300, 400, 500]
    begun = rng.randrange(0, 4)
    setup = _saves(RUN, *steps[:begun], how=rng.choice(["log", "log", "plain"]))
    if rng.random() < 0.2:
        setup += (_sleep(rng.choice([3600.0, 3 * 86400.0])),)
    roots = [RUN]
    actors: list[Actor] = []

    def add(*work: Step, ranks: int = 1) -> None:
        skews = _skews(rng, ranks)
        actors.append(Actor(f"actor-{len(actors)}", work, ranks, skews, signs=True))

    def pause() -> tuple[Step, ...]:
        return (_sleep(rng.choice([1.0, 60.0, 3600.0, 86400.0])),) if rng.random() < 0.4 else ()

    ranks = rng.choice([1, 1, 1, 2, 3])
    parts = rng.random() < 0.2
    overwrite = rng.random() < 0.7
    if rng.random() < 0.2:
        ranks, how = 1, {"how": "manager", "policy": rule}
        overwrite |= rng.random() < 0.5
    work: list[Step] = [("restore", {"root": RUN, "policy": rule})] if how["how"] == "manager" and begun else []
    if how["how"] == "manager" and rng.random() < 0.2:
        # Training is rolled back behind what is there.
        begun = max(begun - 2, 0)
        how["discards"] = (1,)
    for step in steps[begun : begun + rng.choice([1, 2])]:
        work += (*pause(), _save(RUN, step, parts=parts, overwrite=overwrite, **how))
    add(*work, ranks=ranks)
    for _ in range(rng.choice([1, 2, 2, 3])):
        step = rng.choice(steps[: begun + 1])
        choice = rng.randrange(11)
        if choice == 0:
            add(*pause(), _save(RUN, step, **_how(rng, rule)), ranks=rng.choice([1, 2]))
        elif choice in (1, 2, 3):
            add(*pause(), _prune(rule), *pause(), _prune(rule))
        elif choice == 4:
            add(*pause(), _sweep(rng.choice([0.0, 3600.0, 48 * 3600.0]), deep=rng.random() < 0.5))
        elif choice == 5:
            source, target = rng.sample(steps[: begun + 2], 2)
            kind = rng.choice(["cp", "cp", "convert"])
            given = {"source": f"{RUN}/step-{source}", "target": f"{RUN}/step-{target}"}
            add(*pause(), (kind, {**given, "overwrite": rng.random() < 0.7}))
        elif choice == 6:
            add(*pause(), ("pin", {"root": RUN, "step": step, "seconds": rng.choice([0.0, 7200.0])}))
        elif choice == 7:
            add(*pause(), ("load", {"root": RUN, "step": step}), *pause(), ("undo", {"root": RUN, "step": step}))
        elif choice == 8:
            inner = rng.choice([INNER, OWN_FOLDER])
            roots.append(inner)
            add(*pause(), _save(inner, 2, **_how(rng, rule)), *pause(), _save(inner, 3, **_how(rng, rule)))
        elif choice == 9:
            roots.append(NEIGHBOUR)
            near = rng.choice([{"how": "plain"}, {"how": "log"}])
            add(*pause(), _save(NEIGHBOUR, step, **near), _prune(rule, NEIGHBOUR))
        else:
            add(*pause(), ("adopt", {"root": RUN}))
    if rng.random() < 0.15:
        setup += (("plant", {"key": f"{RUN}/step-100/notes.txt"}),)
    return Scenario(
        "mixture",
        setup,
        tuple(actors),
        tuple(dict.fromkeys(roots)),
        chances=Chances(
            rng.choice([0.05, 0.2, 0.5, 1.0]),
            rng.choice([0.0, 0.01, 0.03, 0.1]),
            rng.choice([(4, 1, 1, 1, 1, 1, 1, 0), (1, 0, 0, 0, 0, 0, 0, 0), (1, 4, 4, 1, 1, 1, 1, 0)]),
        ),
        policy=rule,
    )


WRONG_S = 50 * 3600.0


def _with_a_wrong_clock(actor: Actor, rng: random.Random) -> Actor:
    """The actor at a store whose requests carry no time: nothing refuses a clock that is wrong, or jumps."""
    skews = tuple(rng.choice([0.0, rng.uniform(-WRONG_S, WRONG_S), WRONG_S]) for _ in range(actor.ranks))
    jumps = tuple(
        (rng.choice([1.0, 100.0, 4000.0]), rng.uniform(-WRONG_S, WRONG_S)) for _ in range(rng.choice([0, 0, 1, 2]))
    )
    return replace(actor, signs=False, skews=skews, jumps=jumps)


Family = Callable[[random.Random], Scenario]

FAMILIES: tuple[tuple[Family, int], ...] = (
    (plain_over_due, 1),
    (nested, 1),
    (asleep, 2),
    (held, 1),
    (unheard, 1),
    (alone, 1),
    (long_save, 1),
    (copies, 1),
    (newest_gone, 1),
    (going_on, 2),
    (changed_mind, 2),
    (removed, 1),
    (measured_again, 1),
    (wrong_clocks, 2),
    (loads, 1),
    (ended, 1),
    (refused, 1),
    (mixture, 6),
)


def scenario(seed: int, only: str = "") -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    names, weights = zip(*FAMILIES, strict=True)
    family = next((one for one in names if one.__name__ == only), None) or rng.choices(names, weights)[0]
    made = family(rng)
    deletes = rng.random()
    signed = made.family != "wrong clocks" and rng.random() < 0.6
    if not signed:
        made = replace(made, actors=tuple(_with_a_wrong_clock(actor, rng) for actor in made.actors))
    return replace(
        made,
        conditional_delete=deletes < 0.6,
        expiring_delete=signed and deletes >= 0.7,
        dates_writes=rng.random() < 0.7,
        page=rng.choice([2, 4, 1000]),
        delete_page=rng.choice([2, 1000]),
        lists_uploads=rng.random() < 0.7,
    )
