"""The batch script of the examples under Slurm itself, on a cluster of this machine's processes: `make test-slurm`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm import cluster
from slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400
"""Far above the time that any step takes: only a hang reaches it."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(cluster.missing()), reason=f"Slurm is not here: {', '.join(cluster.missing())}"),
]

SEND_USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes. Not below pytest's folders: the spool of a node has a path of at most 107 characters."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        cluster.running(Path(folder), nodes=3, more=request.param) as running,
    ):
        yield running


def until(said: Callable[[], bool], log: Path, slurm: Cluster) -> None:
    limit = time.monotonic() + LIMIT_S
    while not said():
        assert time.monotonic() < limit, f"{log.read_text()[-5000:]}\n{slurm.call('squeue')}"
        time.sleep(0.3)


@pytest.mark.parametrize(
    ("slurm", "how"),
    [
        pytest.param("", "preempted", id="preemption that sends SIGTERM to the steps"),
        pytest.param(SEND_USER_SIGNAL, "preempted", id="preemption that warns the shell"),
        pytest.param("", "time limit", id="time limit"),
    ],
    indirect=["slurm"],
)
def test_saves_requeues_and_resumes_a_job_with_the_nodes_that_are_left(
    slurm: Cluster, how: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    job = slurm.call(
        *("sbatch", "--parsable", "--nodes=1-3", "--gpus-per-node=0", f"--output={log}", f"--chdir={ROOT}"),
        # The shortest time in which a slow machine surely begins to train, and the time for the warning.
        *(("--time=5", "--signal=B:USR1@100") if how == "time limit" else ("--time=30", "--signal=B:USR1@100")),
        *("examples/slurm/train.sbatch", "--sleep", "0.1", "--steps", "1000000"),
        env={
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CHECKPOINT_ROOT": str(tmp_path / "run"),
            "CREDENTIALS_ENV": os.devnull,
            "PROCS_PER_NODE": "1",
            "GRACE_S": "60",
        },
    ).strip()
    until(lambda: "3 ranks begin with step 1\n" in log.read_text(), log, slurm)
    if how == "preempted":
        # It needs two of the three nodes, and keeps them.
        slurm.call(
            "sbatch", "--partition=high", "--nodes=2", "--exclusive", f"--output={os.devnull}", "--wrap=sleep 900"
        )
    else:
        slurm.call("scontrol", "update", "nodename=n2,n3", "state=drain", "reason=trial")
    until(lambda: "stopped after step" in log.read_text(), log, slurm)
    until(lambda: len(re.findall(r"ranks begin", log.read_text())) == 2, log, slurm)
    said = log.read_text()
    stopped = int(re.findall(r"^stopped after step (\d+)$", said, re.MULTILINE)[0])
    assert re.findall(r"^(\d) ranks begin with step (\d+)$", said, re.MULTILINE)[1] == ("1", str(stopped + 1))
    assert slurm.job(job)["Restarts"] == "1"
    # The ranks ended by themselves: neither torchrun nor Slurm killed one.
    assert "SIGKILL" not in said
    assert "Killed" not in said
