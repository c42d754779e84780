"""What the part on unchanged bytes measures: saves of one process that changes some of its state, or all of it.

A process of its own. Reads one JSON command a line and answers with one JSON line.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bench import state as states
from bench.lines import commands, speaker
from bench.resident import cpu_s, forget_peak, memory

SETTLE_S = 0.2
"""Threads and the process that uploads put away their work after the save's future is done."""

FROZEN = states.Shape(hidden=2048, ffn=5632, layers=8)
"""1.03 GB of bf16."""

RANK = 8
"""Of the adapters: 9 MB of fp32, and twice that for their moments."""


def lora_state() -> dict[str, Any]:
    """A frozen transformer in bf16, adapters of its matrices in fp32, and Adam's moments of these."""
    generator = torch.Generator().manual_seed(states.SEED)

    def make(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype).uniform_(-1, 1, generator=generator)

    model = {name: make(size, torch.bfloat16) for name, size in FROZEN.parameters()}
    adapters = {}
    for name, size in FROZEN.parameters():
        if name.startswith("layers.") and len(size) == 2:
            base = name.removesuffix(".weight")
            adapters[f"{base}.lora_A.weight"] = make((RANK, size[1]), torch.float32)
            adapters[f"{base}.lora_B.weight"] = make((size[0], RANK), torch.float32)
    moments = {
        name: {"exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value)}
        for name, value in adapters.items()
    }
    return {"model": {**model, **adapters}, "optim": {"state": moments}}


STATES = {"lora": lora_state, "dense": lambda: states.training_state(states.Shape())}


class Process:
    """The commands."""

    def __init__(self, state: str, unchanged: str, steps: int) -> None:
        from bucketpoint import S3Writer

        self.state = STATES[state]()
        self.writer = S3Writer(progress=False, unchanged=unchanged)  # type: ignore[arg-type]
        for _ in range(steps):
            self.step()

    def step(self) -> dict[str, Any]:
        """Change every element that is trained."""
        for _, tensor in self.trained():
            # As integers: each element gets other bytes, and no rounding leaves one as it was.
            tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).add_(1)
        return {}

    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a step changes: everything that is not frozen."""
        lora = any("lora_" in name for name, _ in states.leaves(self.state))
        yield from ((name, tensor) for name, tensor in states.leaves(self.state) if "lora_" in name or not lora)

    def sizes(self) -> dict[str, Any]:
        """Return the size of the state, and of what a step changes, in bytes."""
        return {"state_bytes": states.nbytes(self.state), "trained_bytes": sum(one.nbytes for _, one in self.trained())}

    def save(self, url: str) -> dict[str, Any]:
        """Save asynchronously, as training does, and wait for the save."""
        from bucketpoint import async_save

        gc.collect()
        time.sleep(SETTLE_S)
        helper = self.writer.uploads.process_id
        for process in self._processes():
            forget_peak(process)
        with _cpu_of_comparisons() as compared:
            used, start = self._cpu_s(), time.monotonic()
            async_save(self.state, checkpoint_id=url, storage_writer=self.writer, no_dist=True).result()
            end = time.monotonic()
            time.sleep(SETTLE_S)
            used = self._cpu_s() - used
        peaks = [memory(process) for process in self._processes()]
        found = {
            "start": start,
            "end": end,
            "wall_s": end - start,
            "cpu_s": used,
            "peak_bytes": sum(peak["VmHWM"] - peak["RssFile"] for peak in peaks),
            "compared_cpu_s": sum(compared),
        }
        if helper != self.writer.uploads.process_id:
            found["started_process"] = True
        return found

    def load(self, url: str) -> dict[str, Any]:
        """Load a checkpoint and compare it with the state."""
        from bucketpoint import S3Reader

        loaded = torch.utils._pytree.tree_map(torch.zeros_like, self.state)
        dcp.load(loaded, checkpoint_id=url, storage_reader=S3Reader(url, progress=False), no_dist=True)
        wrong = states.differences(self.state, loaded, None)
        return {"error": f"{len(wrong)} tensors differ after the load, {wrong[0]} first"} if wrong else {}

    def _processes(self) -> list[int | str]:
        helper = self.writer.uploads.process_id
        return ["self"] if helper is None else ["self", helper]

    def _cpu_s(self) -> float:
        helper = self.writer.uploads.process_id
        return time.process_time() + (cpu_s(helper) if helper is not None else 0.0)


@contextlib.contextmanager
def _cpu_of_comparisons() -> Iterator[list[float]]:
    """CPU seconds of this process while a save compares the state with the last one. Nothing else runs then."""
    from bucketpoint.dcp.saving import uploads

    taken: list[float] = []
    find = uploads.find_unchanged

    def timed(*arguments: Any) -> Any:
        begun = time.process_time()
        try:
            return find(*arguments)
        finally:
            taken.append(time.process_time() - begun)

    uploads.find_unchanged = timed
    try:
        yield taken
    finally:
        uploads.find_unchanged = find


def main() -> None:
    say = speaker()
    process = Process(**json.loads(sys.argv[1]))
    say(process.sizes())
    for command in commands():
        try:
            found = getattr(process, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001 (reported)
            found = {"error": f"{type(error).__name__}: {error}"}
        say(found)


if __name__ == "__main__":
    main()
