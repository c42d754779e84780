"""What each writer and reader loses under the same faults: exceptions, kills and flipped bits, counted.

    python bench/losses.py          some minutes on 2 cores; prints a table
    python bench/losses.py --contenders bucketpoint,s3torchconnector

Every case begins with a checkpoint of one value and saves another one over it, or loads it. A loss is a checkpoint that
then holds a mix, or the wrong one, or none, or a load that returns other values without an error. An error is no loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "src")]

import get_minio  # noqa: E402
from bench import environments  # noqa: E402
from bench.contenders import CONTENDERS  # noqa: E402
from bench.endpoints import client_env  # noqa: E402
from bench.losses_worker import ITEMS  # noqa: E402
from bucketpoint.testing import FaultProxy, FlipReply, FlipRequest, Kill, Script, always  # noqa: E402
from bucketpoint.testing.servers import S3Server, minio  # noqa: E402

OLD, NEW = 1, 2
FRACTIONS = (0.2, 0.5, 0.8)
NAMES = ("bucketpoint", "s3torchconnector", "s3fs")


@dataclass
class Score:
    """How many of the cases of one kind were losses, and what the first of them was."""

    cases: int = 0
    losses: int = 0
    example: str = ""

    def add(self, lost: str | None) -> None:
        self.cases += 1
        if lost is not None:
            self.losses += 1
            self.example = self.example or lost


@dataclass
class Worker:
    """A contender's process, asked one thing at a time."""

    process: subprocess.Popen[str]
    proxy: FaultProxy

    def ask(
        self, op: str, url: str, script: Script | None = None, *, kill_after: int | None = None, **more: Any
    ) -> Any:
        self.proxy.play(Script())
        self.proxy.clear()
        self._say(json.dumps({"op": op, "url": url, **more}))
        child = int(self._hear())
        if kill_after is not None:
            script = always(Kill((child,)), skip=kill_after - 1, times=1)
        self.proxy.play(script or Script())
        self._say("go")
        return json.loads(self._hear())

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@dataclass
class Trial:
    """One contender under all kinds of faults."""

    name: str
    server: S3Server
    worker: Worker
    scores: dict[str, Score] = field(default_factory=dict)

    def run(self) -> None:
        self.fail_at_each_item()
        self.kill_after_each_request()
        self.flip_bits()

    def place(self, name: str) -> str:
        url = self.server.url(self.server.make_bucket("losses"), name)
        told = self.worker.ask("save", url, value=OLD)
        assert "values" in told, told
        return url

    def note(self, kind: str, lost: str | None) -> None:
        self.scores.setdefault(kind, Score()).add(lost)

    def fail_at_each_item(self) -> None:
        for number in range(ITEMS):
            url = self.place("failed")
            self.worker.ask("save", url, value=NEW, fail_at=number)
            self.note("an exception at an item of an overwrite", self._not_one_of(url, OLD))

    def kill_after_each_request(self) -> None:
        url = self.place("counted")
        self.worker.ask("save", url, value=NEW)
        for number in range(1, len(self.worker.proxy.exchanges) + 1):
            url = self.place("killed")
            self.worker.ask("save", url, kill_after=number, value=NEW)
            self.note("SIGKILL after a request of an overwrite", self._not_one_of(url, OLD, NEW))

    def flip_bits(self) -> None:
        for at in FRACTIONS:
            url = self.place("flipped")
            up = always(FlipRequest(at), kinds=["UploadPart", "PutObject"], keys="*.distcp", times=1)
            saved = self.worker.ask("save", url, up, value=NEW)
            expected = [NEW] if "values" in saved else [OLD, NEW]
            self.note("a bit flipped on the way up", self._not_one_of(url, *expected))
            url = self.place("flipped")
            down = always(FlipReply(at), kinds=["GetObject"], keys="*.distcp", times=1)
            self.note("a bit flipped on the way down", self._not_one_of(url, OLD, script=down, errors=True))

    def _not_one_of(self, url: str, *values: int, script: Script | None = None, errors: bool = False) -> str | None:
        """What is wrong with what is loaded."""
        told = self.worker.ask("load", url, script)
        if "raised" in told:
            return None if errors else f"cannot be loaded: {told['raised']}"
        found = told["values"]
        return None if len(found) == 1 and found[0] in values else f"holds {found} without an error"


@contextmanager
def worker_of(name: str, server: S3Server, proxy: FaultProxy) -> Iterator[Worker]:
    contender = CONTENDERS[name]
    script = ROOT / "bench" / "losses_worker.py"
    command = [environments.python_of(contender.env), str(script), name, *contender.modules]
    env = {**os.environ, **client_env(server.at(proxy.url)), "OMP_NUM_THREADS": "1", "AWS_MAX_ATTEMPTS": "3"}
    with tempfile.TemporaryFile("w") as errors:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            worker = Worker(process, proxy)
            ready = worker._hear()
            if ready != "ready\n":
                raise SystemExit(f"the worker of {name} did not start: {ready}")
            yield worker
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--contenders", default=",".join(NAMES))
    names = parser.parse_args().contenders.split(",")
    binary = get_minio.obtain()
    if binary is None:
        raise SystemExit("a MinIO server is needed")
    trials = []
    with minio(binary) as server, FaultProxy(server.endpoint) as proxy:
        for name in names:
            with worker_of(name, server, proxy) as worker:
                trial = Trial(name, server, worker)
                trial.run()
                trials.append(trial)
            for kind, score in trial.scores.items():
                print(f"{name}: {kind}: {score.losses} of {score.cases} lost. {score.example}", flush=True)
    print("\n| | " + " | ".join(trial.name for trial in trials) + " |")
    print("|---" * (len(trials) + 1) + "|")
    for kind in trials[0].scores:
        cells = [f"{trial.scores[kind].losses} of {trial.scores[kind].cases}" for trial in trials]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
