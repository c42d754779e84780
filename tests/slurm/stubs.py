"""Stand-ins for `srun`, `scontrol` and the start of a batch job, where Slurm is not to be had.

They do what Slurm 22.05 does (test_slurm.py): a batch script in a session of its own, tasks in sessions of their own
with Slurm's variables, SIGUSR1 of srun for each process of each task, SIGTERM of srun as a SIGKILL of the tasks.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SRUN = """
import os, signal, subprocess, sys, time

arguments = sys.argv[1:]
nodes = 1
while arguments[0].startswith("--"):
    name, _, value = arguments.pop(0).partition("=")
    assert name in {"--nodes", "--ntasks-per-node", "--cpu-bind", "--wait", "--kill-on-bad-exit"}, name
    if name == "--nodes":
        nodes = int(value)

def started(node):
    own = {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}
    return subprocess.Popen(arguments, env={**os.environ, **own}, start_new_session=True)

def processes(node):
    # Processes of a task, whatever sessions they have made: torchrun gives each rank one.
    marks = {f"STUB_FOLDER={os.environ['STUB_FOLDER']}".encode(), f"SLURM_NODEID={node}".encode()}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if marks <= set(file.read().split(b"\\0")):
                    yield int(name)
        except OSError:
            continue

def send(number, nodes):
    for node in nodes:
        for pid in list(processes(node)):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

with open(os.path.join(os.environ["STUB_FOLDER"], "srun.pid"), "w") as file:
    tasks = [started(node) for node in range(nodes)]
    live = set(range(nodes))
    signal.signal(signal.SIGUSR1, lambda *_: send(signal.SIGUSR1, live))
    # What Slurm's controller sends to a step does not pass through srun: here it comes as SIGUSR2.
    signal.signal(signal.SIGUSR2, lambda *_: send(signal.SIGTERM, live))
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGKILL, live))
    file.write(str(os.getpid()))
while live:
    time.sleep(0.1)
    for node in [node for node in live if tasks[node].poll() is not None]:
        # Slurm kills what a task leaves behind.
        send(signal.SIGKILL, [node])
        live.discard(node)
sys.exit(max(abs(task.returncode) for task in tasks))
"""

SCONTROL = """
import os, sys
from pathlib import Path

folder = Path(os.environ["STUB_FOLDER"])
if sys.argv[1] == "show":
    print("   PreemptEligibleTime=x PreemptTime=" + ("x" if (folder / "preempted").exists() else "None"))
else:
    (folder / "requeued").write_text(" ".join(sys.argv[1:]))
"""


def install(folder: Path) -> Path:
    """Write the stand-ins into a folder for the PATH, and return the folder."""
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        program = folder / name
        program.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def batch(
    script: Path, *arguments: str, folder: Path, nodes: int, restarts: int, log: Path, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Begin a batch script as slurmd does, with the variables that Slurm sets on its first node."""
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_RESTART_COUNT": str(restarts),
        "STUB_FOLDER": str(folder),
    }
    with log.open("ab") as output:
        return subprocess.Popen(
            ["bash", str(script), *arguments],
            env={**os.environ, **env, **slurm},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
