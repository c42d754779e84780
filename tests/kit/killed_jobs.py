"""Jobs that are killed after a request, and judged by what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kit.faults import Kill, Script, always
from kit.kills import Job
from kit.proxy import FaultProxy


def run_and_kill(proxy: FaultProxy, world: int, after: int | None, work: Callable[..., Any], *args: Any) -> bool:
    """Run work on so many ranks, and kill all of them after their request number `after`. Return whether they died."""
    with Job(world) as job:
        job.ready()
        proxy.clear()
        proxy.play(Script() if after is None else always(Kill(job.groups), skip=after - 1, times=1))
        outcomes = job.run(work, *args)
    assert not any(outcome.text for outcome in outcomes), outcomes
    return all(outcome.died for outcome in outcomes)
