"""The batch script of the examples under stand-ins for Slurm's commands, and under Slurm itself: `make test-slurm`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm import cluster, stubs
from slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "slurm"
LIMIT_S = 400
"""Far above the time that any step takes: only a hang reaches it."""

SECRET = "never-on-a-command-line"

SEND_USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who submits the example."""
    return {
        "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CHECKPOINT_ROOT": str(tmp_path / "run"),
        "CREDENTIALS_ENV": os.devnull,
        "PROCS_PER_NODE": "1",
        "GRACE_S": "60",
    }


@pytest.fixture
def stand_ins(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The same with stand-ins for Slurm, and a file with credentials."""
    stubs.install(tmp_path / "bin")
    credentials = tmp_path / "credentials.env"
    credentials.write_text(f"TRIAL_SECRET={SECRET}\n", encoding="utf-8")
    example = {"TRAIN": str(EXAMPLES / "train.py"), "POLICY": str(EXAMPLES / "policy.yaml")}
    return {**env, **example, "CREDENTIALS_ENV": str(credentials)}


def until(said: Callable[[], bool], log: Path, slurm: Cluster | None = None) -> None:
    limit = time.monotonic() + LIMIT_S
    while not said():
        assert time.monotonic() < limit, f"{log.read_text()[-5000:]}\n{slurm and slurm.call('squeue')}"
        time.sleep(0.1)


def read(process: Path, name: str) -> bytes:
    """A file of /proc; nothing for a process that has ended meanwhile, or that is another user's."""
    try:
        return (process / name).read_bytes()
    except OSError:
        return b""


@contextmanager
def killed_on_error(job: subprocess.Popen[bytes], folder: Path) -> Iterator[None]:
    """Kill the job if the test fails: its srun kills the tasks."""
    try:
        yield
    except BaseException:
        if job.poll() is None:
            os.kill(int((folder / "srun.pid").read_text()), signal.SIGTERM)
            job.wait()
        raise


def end(job: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for a job to end, and return its status."""
    try:
        return job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()[-5000:]) from None


@pytest.mark.parametrize("how", ["warned", "preempted"])
def test_saves_requeues_and_resumes_with_fewer_nodes_a_job_told_to_end(
    how: str, stand_ins: dict[str, str], tmp_path: Path
) -> None:
    log, script = tmp_path / "log", EXAMPLES / "train.sbatch"
    first = stubs.batch(
        script, "--sleep", "0.1", "--steps", "100000", folder=tmp_path, nodes=2, restarts=0, log=log, env=stand_ins
    )
    with killed_on_error(first, tmp_path):
        until(lambda: first.poll() is not None or "2 ranks begin with step 1\n" in log.read_text(), log)
        assert first.poll() is None, log.read_text()[-5000:]
        ranks = [one for one in Path("/proc").glob("[0-9]*") if SECRET.encode() in read(one, "environ")]
        assert any(b"LOCAL_RANK=0" in read(one, "environ") for one in ranks)
        assert not any(SECRET.encode() in read(one, "cmdline") for one in ranks)
        if how == "warned":
            # `--signal=B:USR1@180`: the shell alone gets it.
            os.kill(first.pid, signal.SIGUSR1)
        else:
            (tmp_path / "preempted").touch()
            os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR2)
        status = end(first, log)
    said = log.read_text()
    stopped = re.findall(r"^stopped after step (\d+)$", said, re.MULTILINE)
    assert len(stopped) == 1, said
    # torchrun's own status, after its ranks have ended; a signal that ends torchrun makes it another one.
    assert status == 1
    assert (tmp_path / "run" / f"step-{stopped[0]}" / ".metadata").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 4711"
    # Neither torchrun nor Slurm's stand-in killed a rank.
    assert "SIGKILL" not in said

    (tmp_path / "requeued").unlink()
    step = int(stopped[0])
    (tmp_path / "preempted").unlink(missing_ok=True)
    second = stubs.batch(script, "--steps", str(step + 2), folder=tmp_path, nodes=1, restarts=1, log=log, env=stand_ins)
    with killed_on_error(second, tmp_path):
        assert end(second, log) == 0, log.read_text()[-5000:]
    assert log.read_text().splitlines()[-2:] == [
        f"1 ranks begin with step {step + 1}",
        f"finished with step {step + 2}",
    ]
    assert not (tmp_path / "requeued").exists()


def test_requeues_no_job_that_fails(stand_ins: dict[str, str], tmp_path: Path) -> None:
    broken, log = tmp_path / "broken.py", tmp_path / "log"
    broken.write_text("raise SystemExit('out of luck')\n", encoding="utf-8")
    env = {**stand_ins, "TRAIN": str(broken)}
    job = stubs.batch(EXAMPLES / "train.sbatch", folder=tmp_path, nodes=1, restarts=0, log=log, env=env)
    with killed_on_error(job, tmp_path):
        assert end(job, log) != 0
    assert "out of luck" in log.read_text()
    assert not (tmp_path / "requeued").exists()


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes. Not below pytest's folders: the spool of a node has a path of at most 107 characters."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        cluster.running(Path(folder), nodes=3, more=request.param) as running,
    ):
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(cluster.missing()), reason=f"Slurm is not here: {', '.join(cluster.missing())}")
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
    slurm: Cluster, how: str, env: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    job = slurm.call(
        *("sbatch", "--parsable", "--nodes=1-3", "--gpus-per-node=0", f"--output={log}", f"--chdir={ROOT}"),
        # The shortest time in which a slow machine surely begins to train, and the time for the warning.
        *(("--time=5", "--signal=B:USR1@100") if how == "time limit" else ("--time=30", "--signal=B:USR1@100")),
        *("examples/slurm/train.sbatch", "--sleep", "0.1", "--steps", "1000000"),
        env=env,
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
