"""What each writer and reader loses under the same faults: exceptions, kills, lost answers and flipped bits, counted.

    python bench/losses/run.py          some minutes on 2 cores; prints a table
    python bench/losses/run.py --contenders bucketpoint,s3torchconnector

Every case begins with a checkpoint of one value and saves another one over it, or loads it. A loss is a checkpoint that
then holds a mix, or the wrong one, or none, or a load that returns other values without an error. An error is no loss.
A fault that finds nothing to strike, such as a Complete where nothing is sent in parts, is no case.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "src")]

import get_minio  # noqa: E402
from bench import environments  # noqa: E402
from bench.contenders import CONTENDERS  # noqa: E402
from bench.endpoints import client_env  # noqa: E402
from bench.losses.worker import ITEMS  # noqa: E402
from kit import (  # noqa: E402
    CutReply,
    ErrorInBody,
    FaultProxy,
    FlipReply,
    FlipRequest,
    Kill,
    Reset,
    Script,
    always,
)
from kit.servers import S3Server, minio  # noqa: E402

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
    bucket: str = ""
    places: int = 0

    def run(self) -> None:
        self.bucket = self.server.make_bucket("losses")
        self.fail_at_each_item()
        self.kill_after_each_request()
        self.lose_each_answer()
        self.refuse_in_the_body()
        self.damage_what_goes_up()
        self.damage_what_comes_down()

    def place(self) -> str:
        """A checkpoint of the old value, at a URL of its own."""
        self.places += 1
        url = self.server.url(self.bucket, f"case-{self.places}")
        told = self.worker.ask("save", url, value=OLD)
        assert "values" in told, told
        return url

    def note(self, kind: str, lost: str | None) -> None:
        self.scores.setdefault(kind, Score()).add(lost)

    def fail_at_each_item(self) -> None:
        for number in range(ITEMS):
            url = self.place()
            self.worker.ask("save", url, value=NEW, fail_at=number)
            self.note("an exception at an item of an overwrite", self._not_one_of(url, OLD))

    def kill_after_each_request(self) -> None:
        self.worker.ask("save", self.place(), value=NEW)
        for number in range(1, len(self.worker.proxy.exchanges) + 1):
            url = self.place()
            self.worker.ask("save", url, kill_after=number, value=NEW)
            self.note("SIGKILL after a request of an overwrite", self._not_one_of(url, OLD, NEW))

    def lose_each_answer(self) -> None:
        self.worker.ask("save", self.place(), value=NEW)
        for number in range(len(self.worker.proxy.exchanges)):
            self._overwrite(
                "the answer to a request of an overwrite is lost", always(Reset(acted=True), skip=number, times=1)
            )

    def refuse_in_the_body(self) -> None:
        for acted in (False, True):
            self._overwrite("Complete answers 200 with an error in its body", always(ErrorInBody(acted=acted), times=1))

    def damage_what_goes_up(self) -> None:
        for at in FRACTIONS:
            script = always(FlipRequest(at), kinds=["UploadPart", "PutObject"], keys="*.distcp", times=1)
            self._overwrite("a bit flipped on the way up", script)

    def damage_what_comes_down(self) -> None:
        url = self.place()
        for kind, fault in (("a bit flipped on the way down", FlipReply), ("an answer cut short", CutReply)):
            for at in FRACTIONS:
                script = always(fault(at), kinds=["GetObject"], keys="*.distcp", times=1)
                lost = self._not_one_of(url, OLD, script=script, errors=True)
                if self.worker.proxy.counts.faults:
                    self.note(kind, lost)

    def _overwrite(self, kind: str, script: Script) -> None:
        """A save that says that it is done must have been done; one that raises may have been, too."""
        url = self.place()
        saved = self.worker.ask("save", url, script, value=NEW)
        if self.worker.proxy.counts.faults:
            self.note(kind, self._not_one_of(url, NEW, *([] if "values" in saved else [OLD])))

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
    script = ROOT / "bench" / "losses" / "worker.py"
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
    print(f"\n{', '.join(f'{name} {version}' for name, version in versions(binary, names).items())}")
    print("\n| | " + " | ".join(CONTENDERS[trial.name].title for trial in trials) + " |")
    print("|---" * (len(trials) + 1) + "|")
    for kind in dict.fromkeys(kind for trial in trials for kind in trial.scores):
        found = [trial.scores.get(kind, Score()) for trial in trials]
        cells = [f"{score.losses} of {score.cases}" if score.cases else "no case" for score in found]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    return 0


def versions(minio: Path, names: list[str]) -> dict[str, str]:
    """Of what was tried, as each environment has it."""
    wanted = {
        "main": ["bucketpoint", "torch", "boto3", *(["s3torchconnector"] if "s3torchconnector" in names else [])],
        "s3fs": ["torch", "s3fs"],
    }
    program = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"
    found: dict[str, str] = {}
    for env in dict.fromkeys(CONTENDERS[name].env for name in names):
        told = subprocess.run(
            [environments.python_of(env), "-c", program, *wanted[env]], capture_output=True, text=True, check=True
        ).stdout.split()
        found |= dict(zip(wanted[env], told, strict=True))
    return {**found, "minio": environments.first_line([str(minio), "--version"]).removeprefix("minio version ")}


if __name__ == "__main__":
    sys.exit(main())
