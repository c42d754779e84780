"""A Slurm cluster of this machine's processes: slurmctld and several slurmd on 127.0.0.1, in a temporary folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.servers import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
LIMIT_S = 120

# Nodes that share this machine claim cores that it does not have. `cred_expire` is also the time for which a requeued
# job is held back: 120 s unless it is said, and 5 s at least.
CONFIG = """
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
{more}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=10
NodeName=n[1-{count}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=4 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=100
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run one of Slurm's commands, which must succeed, and return its output."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.env, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says, by its names."""
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)


def missing() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def running(folder: Path, *, nodes: int, more: str = "") -> Iterator[Cluster]:
    """Run a cluster until the end of the block. Its processes are ended by their ids."""
    ports = [free_port() for _ in range(nodes)]
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=socket.gethostname(),
            port=free_port(),
            user=getpass.getuser(),
            folder=folder,
            count=nodes,
            ports=",".join(map(str, ports)),
            more=more,
        ),
        encoding="utf-8",
    )
    cluster = Cluster(folder)
    with ExitStack() as daemons:
        _start(daemons, cluster, "slurmctld", "-D", "-i")
        for number in range(1, nodes + 1):
            (folder / f"n{number}").mkdir()
            _start(daemons, cluster, "slurmd", "-D", "-N", f"n{number}")
        until = time.monotonic() + LIMIT_S
        while cluster.call("sinfo", "--noheader", "--format=%D %t", "--partition=low").split() != [str(nodes), "idle"]:
            assert time.monotonic() < until, cluster.call("sinfo")
            time.sleep(0.2)
        try:
            yield cluster
        finally:
            # What still runs belongs to slurmstepd, which a slurmd does not take along.
            cluster.call("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
            cluster.call("scancel", "--user", getpass.getuser())
            until = time.monotonic() + LIMIT_S
            while cluster.call("squeue", "--noheader").strip() and time.monotonic() < until:
                time.sleep(0.2)


def _start(daemons: ExitStack, cluster: Cluster, *command: str) -> None:
    log = daemons.enter_context((cluster.folder / f"{'-'.join(command)}.out").open("w", encoding="utf-8"))
    env = {**os.environ, **cluster.env}
    daemon = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def end() -> None:
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    daemons.callback(end)
