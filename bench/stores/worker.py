"""The measuring process of the part for stores: saves and loads through one library, each in a forked child of its own.

Reads one JSON command a line on standard input and answers with one JSON line, as `worker` does for S3. What is here
and in no other part: who saves and loads in which way, in `CONTENDERS`, one row each.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bench import state as states
from bench.lines import answer_each, speaker
from bench.resident import forget_peak, memory

SHAPE = states.Shape(hidden=1024, ffn=4096, layers=1, vocab=8192)
"""25 million parameters: 252 MB with both moments."""


@dataclass(frozen=True)
class Contender:
    """`save(state, url)` and `load(state, url)`; the modules are imported before the fork."""

    save: Callable[[Any, str], None]
    load: Callable[[Any, str], None]
    modules: Sequence[str] = ()


def _s3fs() -> Any:
    import s3fs

    return s3fs.S3FileSystem()


def _save_generic(state: Any, url: str) -> None:
    from bucketpoint import BucketWriter

    dcp.save(state, checkpoint_id=url, storage_writer=BucketWriter(fs=_s3fs()), no_dist=True)


def _load_generic(state: Any, url: str) -> None:
    from bucketpoint import BucketReader

    dcp.load(state, checkpoint_id=url, storage_reader=BucketReader(fs=_s3fs()), no_dist=True)


def _save_torch(state: Any, url: str) -> None:
    from torch.distributed.checkpoint import FsspecWriter

    dcp.save(state, storage_writer=FsspecWriter(url), no_dist=True)


def _load_torch(state: Any, url: str) -> None:
    from torch.distributed.checkpoint import FsspecReader

    dcp.load(state, storage_reader=FsspecReader(url), no_dist=True)


def _save_gcs(state: Any, url: str) -> None:
    from bucketpoint import GCSWriter

    dcp.save(state, checkpoint_id=url, storage_writer=GCSWriter(), no_dist=True)


def _load_gcs(state: Any, url: str) -> None:
    from bucketpoint import GCSReader

    dcp.load(state, checkpoint_id=url, storage_reader=GCSReader(), no_dist=True)


CONTENDERS = {
    "bucketpoint + s3fs": Contender(_save_generic, _load_generic, ("s3fs", "bucketpoint", "awscrt")),
    "torch + s3fs": Contender(_save_torch, _load_torch, ("s3fs",)),
    "bucketpoint + gcs": Contender(_save_gcs, _load_gcs, ("google.cloud.storage", "bucketpoint", "awscrt")),
    "torch + gcsfs": Contender(_save_torch, _load_torch, ("gcsfs",)),
}


def main() -> None:
    say = speaker()
    # OpenMP's threads do not survive a fork: the parent must never start them.
    torch.set_num_threads(1)
    full, tiny = states.training_state(SHAPE), states.training_state(states.TINY)
    answer_each(
        say, lambda command: _measure(command, full, tiny), lambda command: CONTENDERS[command["contender"]].modules
    )


def _measure(command: dict[str, Any], full: Any, tiny: Any) -> dict[str, Any]:
    os.environ.update(command["env"])
    torch.set_num_threads(os.cpu_count() or 1)
    contender, op, url = CONTENDERS[command["contender"]], command["op"], command["url"]
    target = full if op == "save" else states.blank_state(SHAPE) if op == "load" else states.quarter_state(SHAPE, 0)
    before = memory()
    if command["warm_url"]:
        # What is measured is a job's second save, and not its first.
        contender.save(tiny, command["warm_url"])
        contender.load(states.blank_state(states.TINY), command["warm_url"])
    forget_peak()
    used, start = os.times(), time.monotonic()
    (contender.save if op == "save" else contender.load)(target, url)
    end, now, after = time.monotonic(), os.times(), memory()
    answer = {
        "start": start,
        "end": end,
        "wall_s": end - start,
        "user_s": now.user - used.user,
        "system_s": now.system - used.system,
        "needed_bytes": states.nbytes(target),
        "peak_bytes": max(after["VmHWM"] - after["RssFile"] - before["anonymous"], 0),
    }
    wrong = [] if op == "save" else states.differences(full, target, 0 if op == "quarter0" else None)
    if wrong:
        answer["error"] = f"{len(wrong)} tensors differ after the load, {wrong[0]} first"
    return answer


if __name__ == "__main__":
    main()
