"""A measuring process and whoever asks it, one JSON object a line each way. Both ends; nothing is measured here."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STOP_TIMEOUT_S = 60

Answer = dict[str, Any]


@dataclass
class Worker:
    """A process that is asked."""

    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls, module: str, *arguments: str, python: str = sys.executable, env: Mapping[str, str] | None = None
    ) -> Worker:
        """Run a module of the benchmark, with an environment's interpreter."""
        process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(env or {}),
            cwd=ROOT,
        )
        return cls(process)

    def ask(self, command: Mapping[str, Any]) -> Answer:
        """What it answers; an `error` from the moment on in which it ends."""
        assert self.process.stdin is not None
        if not self.ended:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        return self.hear()

    def do(self, name: str, **arguments: Any) -> Answer:
        """`ask` a process whose commands have names."""
        return self.ask({"do": name, **arguments})

    def hear(self) -> Answer:
        """What it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: Answer = json.loads(line) if line else {"error": f"the process ended with status {self.process.wait()}"}
        return answer

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """What such a process finds: this checkout's modules, those of the tests behind the benchmark's."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "src", ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": path, **extra}


def speaker() -> Callable[[Answer], None]:
    """What says an answer, in the process that is asked: the one thing that goes to its standard output from here on.

    What libraries print goes to standard error, and their warnings nowhere.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def say(answer: Answer) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    return say


def commands() -> Iterator[Any]:
    """What is asked, until nobody asks any more."""
    for line in sys.stdin:
        yield json.loads(line)


def import_all(modules: Iterable[str]) -> Answer | None:
    """Import them, before a fork and the clock. The answer of a process that cannot."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return {"error": f"cannot import {module}: {error}"}
    return None


def answer_each(
    say: Callable[[Answer], None], measure: Callable[[Answer], Answer], modules: Callable[[Answer], Iterable[str]]
) -> None:
    """Say what `measure` finds of each command, in a child of its own that has the command's modules from the start."""
    for command in commands():
        say(import_all(modules(command)) or in_child(partial(measure, command)))


def in_child(measure: Callable[[], Answer]) -> Answer:
    """What a forked child answers. It starts from this process's image, and what it leaves behind goes with it."""
    # Freed memory of the parent must not serve the child's allocations unseen, nor be collected on its time.
    gc.collect()
    gc.freeze()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            answer = measure()
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        with os.fdopen(write, "w") as out:
            out.write(json.dumps(answer))
        # Not exit(): the teardown of native clients is not what is measured, and may hang after a fork.
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as source:
        text = source.read()
    _, status = os.waitpid(pid, 0)
    answered: Answer = json.loads(text) if text else {"error": f"the measured process ended with status {status}"}
    return answered
