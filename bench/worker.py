"""A process that holds the state and measures operations, each in a forked child of its own. No orchestration here.

Reads one JSON command a line on standard input and answers with one JSON line. The fork makes each measurement start
from the same process image: libraries imported, state in memory, no client, no thread and no allocator shared between
contenders. What is reported is the client's alone; the server is another process.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from typing import Any

import torch

from bench import state as states
from bench.contenders import CHILD_PEAK_BYTES, CONTENDERS, Contender, Setting
from bench.lines import answer_each, speaker
from bench.resident import forget_peak, memory

QUARTER_DIM = {"quarter0": 0, "quarter1": 1}


def main() -> None:
    say = speaker()
    # OpenMP's threads do not survive a fork: the parent must never start them.
    torch.set_num_threads(1)
    full, tiny = states.training_state(states.Shape()), states.training_state(states.TINY)
    say({"state_bytes": states.nbytes(full), "tensors": len(list(states.leaves(full)))})
    answer_each(
        say, lambda command: _measure(command, full, tiny), lambda command: CONTENDERS[command["contender"]].modules
    )


def _measure(command: dict[str, Any], full: Any, tiny: Any) -> dict[str, Any]:
    os.environ.update(command["env"])
    torch.set_num_threads(os.cpu_count() or 1)
    contender, op = CONTENDERS[command["contender"]], command["op"]
    setting = Setting(**command["setting"])
    target = _target(contender, op, full)
    contender.prepare(op, setting)
    gc.collect()
    before = memory()
    if command.get("warm_url"):
        _warm_up(contender, command["warm_url"], tiny)
    forget_peak()
    action = contender.save if op in ("save", "overwrite") else contender.load
    cpu, start = _cpu(), time.monotonic()
    action(target, setting)
    end, used = time.monotonic(), _cpu()
    after = memory()
    needed = states.nbytes(target) if contender.knows_state else sum(setting.layout)
    children = max(CHILD_PEAK_BYTES, default=0)
    answer = {
        "start": start,
        "end": end,
        "wall_s": end - start,
        "user_s": used[0] - cpu[0],
        "system_s": used[1] - cpu[1],
        "needed_bytes": needed,
        # Pages of libraries that are mapped from files come and go with the page cache: they are not counted.
        "peak_bytes": max(after["VmHWM"] - after["RssFile"] - before["anonymous"], 0) + children,
    }
    if contender.knows_state and op not in ("save", "overwrite"):
        wrong = states.differences(full, target, QUARTER_DIM.get(op))
        if wrong:
            answer["error"] = f"{len(wrong)} tensors differ after the load, {wrong[0]} first"
    return answer


def _target(contender: Contender, op: str, full: Any) -> Any:
    if not contender.knows_state:
        return {}
    if op in ("save", "overwrite"):
        return full
    return (
        states.quarter_state(states.Shape(), QUARTER_DIM[op])
        if op in QUARTER_DIM
        else states.blank_state(states.Shape())
    )


def _warm_up(contender: Contender, url: str, tiny: Any) -> None:
    """One small save and load, so that what is measured is a job's second save and not its first."""
    if not contender.knows_state:
        return
    contender.save(tiny, Setting(url=url))
    contender.load(states.blank_state(states.TINY), Setting(url=url))


def _cpu() -> tuple[float, float]:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime for usage in both), sum(usage.ru_stime for usage in both)


if __name__ == "__main__":
    main()
