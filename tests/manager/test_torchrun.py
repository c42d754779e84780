"""The manager in a job that torchrun starts: two runs of one script, the second on another number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_a_job_under_torchrun_saves_and_another_one_of_other_size_goes_on(tmp_path: Path) -> None:
    script, out, root = tmp_path / "train.py", tmp_path / "out.json", tmp_path / "run"
    script.write_text(SCRIPT)
    told = []
    for ranks in (2, 1):
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), str(script), str(root), str(out)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        told.append(json.loads(out.read_text()))
    assert told[0] == {"restored": 0, "w": 2.0, "steps": [1, 2]}
    assert told[1]["restored"] == 2
    assert told[1]["w"] == 4.0
    assert told[1]["steps"][-2:] == [3, 4]
