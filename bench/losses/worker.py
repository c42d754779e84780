"""One contender's saves and loads, each in a fork that may be killed. Runs in the contender's own environment.

Commands come as JSON lines: `{"op", "url", "value", "fail_at"}`. The answer to each is the fork's process id, and after
the line `go` what it came to.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.contenders import CONTENDERS, Setting

ITEMS = 4
ITEM_BYTES = 3 << 20


class FailsAt(dcp.DefaultSavePlanner):
    """Raises when the n-th item is asked for."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def resolve_data(self, write_item: Any) -> Any:
        if self.left == 0:
            raise OSError("this disk is on fire")
        self.left -= 1
        return super().resolve_data(write_item)


def state(value: int) -> dict[str, Any]:
    return {f"item_{number}": torch.full((ITEM_BYTES,), value, dtype=torch.uint8) for number in range(ITEMS)}


def act(contender: str, command: dict[str, Any]) -> dict[str, Any]:
    op, fail_at = command["op"], command.get("fail_at")
    if fail_at is not None:
        plain = dcp.save
        dcp.save = lambda *args, **kwargs: plain(*args, planner=FailsAt(fail_at), **kwargs)
    held = state(command.get("value", 0))
    try:
        getattr(CONTENDERS[contender], op)(held, Setting(command["url"]))
    except BaseException as error:  # noqa: BLE001 (DCP's own is no Exception, and each is an answer)
        return {"raised": type(error).__name__}
    return {"values": sorted({value for tensor in held.values() for value in tensor.unique().tolist()})}


def main(contender: str, modules: list[str]) -> None:
    warnings.simplefilter("ignore")
    for module in modules:
        importlib.import_module(module)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        command = json.loads(line)
        gate, opened = os.pipe()
        answers, answer = os.pipe()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            os.close(opened)
            os.read(gate, 1)
            os.write(answer, json.dumps(act(contender, command)).encode())
            os._exit(0)
        os.close(answer)
        os.close(gate)
        print(child, flush=True)
        sys.stdin.readline()
        os.write(opened, b"g")
        os.close(opened)
        told = b""
        while some := os.read(answers, 65536):
            told += some
        os.close(answers)
        os.waitpid(child, 0)
        print(told.decode() or '{"raised": "killed"}', flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
