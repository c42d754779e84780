"""The manager in jobs that torchrun starts: a second one on another number of ranks, and one that is told to stop."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from manager import torchrun

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from bucketpoint import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy

root, out = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"w": torch.zeros(64), "step": 0}
with CheckpointManager(root, policy=RetentionPolicy(Keep(2))) as manager:
    found = manager.restore(state, "latest")
    begin = 0 if found is None else found.step
    for step in range(begin + 1, begin + 3):
        state["w"] += 1
        state["step"] = step
        manager.save(step, state)
    manager.wait()
    steps = manager.steps()
    if rank == 0:
        said = {"restored": begin, "w": float(state["w"][0]), "steps": steps}
        open(out, "w").write(json.dumps(said))
dist.destroy_process_group()
"""

STOPPED = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from bucketpoint import CheckpointManager
from bucketpoint.retention import Keep, RetentionPolicy, Save, SaveEvery
from bucketpoint.stores.local import LocalStore

root, notes = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
put = LocalStore.put

def slow(store, key, *args, **kwargs):
    if key.endswith(".distcp") and rank == 1:
        # The other rank waits for this one meanwhile.
        (notes / f"pids-{os.getpid()}-{os.getppid()}").touch()
        until = time.monotonic() + 100
        while not (notes / "told").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1)
    return put(store, key, *args, **kwargs)

LocalStore.put = slow
state = {"w": torch.zeros(64), f"own-{rank}": torch.ones(64), "step": 0}
policy = RetentionPolicy(Keep(9), save=Save(every=[SaveEvery(1000)], on=["first_step", "sigterm"]))
with CheckpointManager(root, policy=policy, grace_s=60) as manager:
    for step in range(1, 10_000):
        gradient = torch.ones(4096)
        dist.all_reduce(gradient)
        state["w"] += gradient[0]
        state["step"] = step
        if manager.should_save(step):
            manager.save(step, state)
        if manager.stop_asked:
            break
        time.sleep(0.01)
(notes / f"ended-{rank}-{step}").touch()
dist.destroy_process_group()
"""


def test_saves_in_a_job_under_torchrun_and_resumes_in_one_of_another_size(tmp_path: Path) -> None:
    script, out, root = tmp_path / "train.py", tmp_path / "out.json", tmp_path / "run"
    script.write_text(SCRIPT)
    told = []
    for ranks in (2, 1):
        torchrun.end(torchrun.start(script, str(root), str(out), ranks=ranks))
        told.append(json.loads(out.read_text()))
    assert told[0] == {"restored": 0, "w": 2.0, "steps": [1, 2]}
    assert told[1]["restored"] == 2
    assert told[1]["w"] == 4.0
    assert told[1]["steps"][-2:] == [3, 4]


def test_commits_twice_and_exits_with_0_after_sigterm_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    script, notes, root = tmp_path / "train.py", tmp_path / "notes", tmp_path / "run"
    script.write_text(STOPPED)
    notes.mkdir()
    job = torchrun.start(script, str(root), str(notes), ranks=2)
    try:
        while not (pids := list(notes.glob("pids-*"))) and job.poll() is None:
            time.sleep(0.05)
        # A scheduler tells the processes of a job. torchrun would say that it was told, whatever becomes of its ranks.
        pid, agent = (int(part) for part in pids[0].name.split("-")[1:])
        assert agent == job.pid
        os.kill(pid, signal.SIGTERM)
        (notes / "told").touch()
    finally:
        torchrun.end(job, 60)
    ended = sorted(path.name for path in notes.glob("ended-*"))
    stopped_at = int(ended[0].split("-")[-1])
    assert ended == [f"ended-{rank}-{stopped_at}" for rank in (0, 1)]
    assert sorted(path.parent.name for path in root.glob("*/.metadata")) == sorted({"step-1", f"step-{stopped_at}"})
