"""Kills a training run in the middle of an upload, resumes it on half the ranks, and shows that nothing was lost.

python examples/demo.py                          # on an S3 server of this machine's own, which stays until Ctrl-C
python examples/demo.py --url s3://bucket/empty  # on a real bucket, with the credentials that boto3 finds
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final
from urllib.parse import urlsplit

import boto3
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from bucketpoint import S3Reader, latest_checkpoint
from bucketpoint.errors import IncompleteCheckpointError

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import get_minio  # noqa: E402
from local_bucket import BUCKET, SPOILERS, local_bucket  # noqa: E402
from slow_network import SlowNetwork, Traffic  # noqa: E402

STEPS, SAVE_EVERY, KILL_AT = 40, 8, 24
UPLOAD_BYTES_PER_SECOND = 6e6  # a save of 10 MB then takes 8 steps' time
GOOD_PART = 1e6
TOLERANCE = 1e-3  # relative; sums over 2 and over 4 ranks round differently
STOP_SECONDS = 30


def main() -> int:
    args = parse_args()
    # The end of the terminal, and `kill`, are to leave nothing behind either.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with store(args.url) as at, tempfile.TemporaryDirectory(prefix="bucketpoint-demo-") as folder:
        good = show(at, Path(folder))
        leave(at)
    return 0 if good else 1


def show(at: Bucket, logs: Path) -> bool:
    """Run the whole demo. Return True if every check holds."""
    started = time.monotonic()
    checks: dict[str, bool] = {}
    title(f"1  The reference: {STEPS} steps on 4 ranks, nothing saved, nothing interrupted")
    with Training(logs / "reference", ranks=4) as reference:
        reference.follow()

    title(f"2  The same, saving every {SAVE_EVERY} steps, killed in the middle of an upload")
    with Training(logs / "killed", ranks=4, root=at.root) as killed, at.measured():
        caught = killed.follow(until=lambda step: step >= KILL_AT and at.uploading(step))
        killed.kill()
        if at.network:
            at.network.cut()
    half = f"step-{killed.saving}"
    if not caught:
        raise SystemExit("every upload ended before it could be interrupted: the store is too fast for this model")
    say(f"SIGKILL to torchrun and its {len(killed.pids)} ranks while {half} was being uploaded")
    held = at.show("The bucket after the kill")
    newest = latest_checkpoint(at.root)
    say(f"the newest whole checkpoint is {newest}")
    checks["the kill left half a checkpoint"] = held[half].objects > 0 and not held[half].whole
    checks["half a checkpoint is refused"] = is_refused(f"{at.root}/{half}")
    checks["whole ones are found beside it"] = newest is not None

    title("3  A second run, on 2 ranks")
    with Training(logs / "resumed", ranks=2, root=at.root) as resumed, at.measured():
        resumed.follow()
    checks["it resumed from the newest whole one"] = newest is not None and resumed.resumed_from == newest

    title("4  Side by side")
    worst = compare(reference, killed, resumed)
    held = at.show("The bucket at the end")
    checks[f"losses agree within {TOLERANCE:g} (largest difference {worst:.1e})"] = worst <= TOLERANCE
    checks["the last step is whole, and the newest"] = latest_checkpoint(at.root) == f"{at.root}/step-{STEPS}"

    title(f"5  {'All is well' if all(checks.values()) else 'FAILED'}, after {time.monotonic() - started:.0f} s")
    for what, holds in checks.items():
        say(f"{'yes' if holds else 'NO':3}  {what}")
    return all(checks.values())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--url", metavar="S3_URL", help="an empty prefix of a real bucket to use instead of a local server"
    )
    return parser.parse_args()


@contextlib.contextmanager
def store(url: str | None) -> Iterator[Bucket]:
    """Where the demo saves: under `url`, or on a server that lives as long as the demo."""
    if url:
        at = Bucket(url.rstrip("/"), boto3.client("s3"))
        if at.steps():
            raise SystemExit(f"{url} is not empty: name a prefix that is")
        yield at
        return
    with (
        local_bucket(get_minio.find()) as local,
        SlowNetwork(urlsplit(local.endpoint).port or 80, UPLOAD_BYTES_PER_SECOND) as network,
    ):
        exports = local.exports()
        for name in SPOILERS:
            os.environ.pop(name, None)
        # This process looks into the bucket past the slow network, so that what is counted is the training's alone.
        os.environ.update(local.env | {"AWS_ENDPOINT_URL": network.endpoint, "NO_PROXY": "127.0.0.1,localhost"})
        say(f"{local.kind} on {local.endpoint}, behind a network that uploads {UPLOAD_BYTES_PER_SECOND / 1e6:g} MB/s")
        yield Bucket(f"s3://{BUCKET}/gpt", boto3.client("s3", endpoint_url=local.endpoint), network, exports)


def leave(at: Bucket) -> None:
    """Name the commands that look at the bucket, which stays as long as somebody at a terminal wants it."""
    command = Path(sys.executable).with_name("bucketpoint")
    look = f"  {command} ls {at.root}\n  {command} show {at.root}/step-{STEPS}"
    if not at.exports:
        say(f"\nThe checkpoints stay under {at.root}. To look at them:\n\n{look}")
    elif sys.stdin.isatty():
        say(f"\nThe bucket stays until Ctrl-C. To look at it, in another shell:\n\n{at.exports}\n\n{look}")
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


@dataclass
class Held:
    """What the bucket holds of one step."""

    objects: int = 0
    size: int = 0
    whole: bool = False
    leftover: int = 0
    """Bytes of an interrupted attempt that no checkpoint refers to."""


class Bucket:
    """The bucket as its owner sees it: plain S3 calls, nothing of bucketpoint."""

    def __init__(self, root: str, client: Any, network: SlowNetwork | None = None, exports: str = "") -> None:
        self.root, self.client, self.network, self.exports = root, client, network, exports

    def objects(self) -> Iterator[tuple[str, str, int]]:
        """(step, name below it, size) of every object."""
        name, _, prefix = self.root.removeprefix("s3://").partition("/")
        prefix = f"{prefix}/" if prefix else ""
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=prefix):
            for entry in page.get("Contents", []):
                step, _, rest = entry["Key"].removeprefix(prefix).partition("/")
                yield step, rest, entry["Size"]

    def steps(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for step, name, size in self.objects():
            held = found.setdefault(step, Held())
            held.objects += 1
            held.size += size
            held.whole |= name == ".metadata"
        return dict(sorted(found.items(), key=lambda item: int(item[0].rpartition("-")[2])))

    def uploading(self, step: int) -> bool:
        """A good part of this step's data has arrived, and the commit has not."""
        held = self.steps().get(f"step-{step}", Held())
        return held.size >= GOOD_PART and not held.whole

    def show(self, heading: str) -> dict[str, Held]:
        say(f"\n{heading}:")
        say(f"  {'step':8} {'state':12} {'objects':>8} {'MB':>7}  {'left over by the kill':>21}")
        steps = self.steps()
        used = {step: referenced(f"{self.root}/{step}") for step, held in steps.items() if held.whole}
        for step, name, size in self.objects():
            if step in used and name.startswith("data/") and name not in used[step]:
                steps[step].leftover += size
        for step, held in steps.items():
            state = "whole" if held.whole else "interrupted"
            leftover = f"{held.leftover / 1e6:.2f} MB" if held.leftover else "-"
            say(f"  {step:8} {state:12} {held.objects:8} {held.size / 1e6:7.2f}  {leftover:>21}")
        return steps

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Tell the requests and bytes of what runs inside, where the network is ours to watch."""
        before = self.network.traffic.copy() if self.network else Traffic()
        yield
        if self.network:
            spent = self.network.traffic.since(before)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(spent.requests.items()))
            say(f"requests: {kinds}; {spent.sent / 1e6:.1f} MB up, {spent.received / 1e6:.1f} MB down")


def referenced(url: str) -> set[str]:
    """The objects that a checkpoint consists of."""
    return {item.relative_path for item in S3Reader(url).read_metadata().storage_data.values()}


def is_refused(url: str) -> bool:
    # DCP would log a traceback and warn that this process is alone; the reason is told below.
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.load({}, checkpoint_id=url, storage_reader=S3Reader(), no_dist=True)
    except CheckpointException as error:
        reason, _ = error.failures[0]
        say(textwrap.fill(f"loading it: {type(reason).__name__}: {reason}", 100, subsequent_indent="  "))
        return isinstance(reason, IncompleteCheckpointError)
    return False


def compare(reference: Training, killed: Training, resumed: Training) -> float:
    """Print the losses beside each other and return the largest relative difference; infinite if a step is missing."""
    say(f"  {'step':>4}  {'uninterrupted':>13}  {'killed':>9}  {'resumed':>9}")
    say(f"  {'':4}  {'4 ranks':>13}  {'4 ranks':>9}  {'2 ranks':>9}")
    columns = (reference.losses, killed.losses, resumed.losses)
    for step in sorted({1, *range(4, STEPS + 1, 4)}):
        cells = [f"{losses[step]:.5f}" if step in losses else "-" for losses in columns]
        say(f"  {step:4}  {cells[0]:>13}  {cells[1]:>9}  {cells[2]:>9}")
    if not resumed.losses or set(range(min(resumed.losses), STEPS + 1)) - set(resumed.losses):
        return math.inf
    others = [*killed.losses.items(), *resumed.losses.items()]
    return max(abs(loss - reference.losses[step]) / reference.losses[step] for step, loss in others)


def title(text: str) -> None:
    say(f"\n{text}")


def say(text: str) -> None:
    print(text, flush=True)


@final
class Training:
    """One run of train_gpt.py under torchrun, followed through the log that it writes."""

    def __init__(self, logs: Path, ranks: int, root: str | None = None) -> None:
        self.events = logs.with_suffix(".jsonl")
        self.output = logs.with_suffix(".txt")
        self.losses: dict[int, float] = {}
        self.pids: list[int] = []
        self.resumed_from: str | None = None
        self.saving = 0
        self._read = 0
        launcher = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        script = [str(HERE / "train_gpt.py"), "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        script += ["--events", str(self.events)] + (["--checkpoint", root] if root else [])
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--local-addr", "127.0.0.1", *script]
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        # On the CPU everywhere: a machine with one GPU has none for each of 4 ranks.
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback} | os.environ
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(logs.parent)}  # torchrun leaves folders behind
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.process.poll() is None:
            # torchrun ends its ranks on this signal, also those that have not told their process id yet.
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
            self.kill()
        if error is not None and self.output.exists():
            sys.stderr.write(self.output.read_text()[-4000:])

    def follow(self, until: Callable[[int], bool] = lambda saving: False) -> bool:
        """Tell what happens until `until` says yes to the step being saved (True), or the run ends well (False)."""
        while True:
            ended = self.process.poll() is not None
            for event in self._news():
                self._tell(event)
            if until(self.saving):
                return True
            if ended:
                if self.process.returncode:
                    raise SystemExit(f"training failed with exit code {self.process.returncode}")
                return False
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as the kernel or a preempted machine would: nobody gets to clean up."""
        for pid in (self.process.pid, *self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _news(self) -> list[dict[str, Any]]:
        """Whole lines that were added to the log since the last call."""
        if not self.events.exists():
            return []
        with self.events.open("rb") as log:
            log.seek(self._read)
            whole = [line for line in log if line.endswith(b"\n")]
        self._read += sum(map(len, whole))
        return [json.loads(line) for line in whole]

    def _tell(self, event: dict[str, Any]) -> None:
        if "pids" in event:
            self.pids = event["pids"]
        elif "resumed" in event:
            self.resumed_from = event["resumed"]
            say(f"resumed from {event['resumed']}")
        elif "loss" in event:
            self.losses[event["step"]] = event["loss"]
            if event["step"] % SAVE_EVERY == 0:
                say(f"step {event['step']:3}  loss {event['loss']:.4f}  {event['seconds'] * 1e3:4.0f} ms")
        elif "saving" in event:
            self.saving = event["step"]
            say(f"          saving {event['saving']}, training waited {event['blocked'] * 1e3:.0f} ms")
        elif "saved" in event:
            say(f"          saved  {event['saved']} in {event['seconds']:.1f} s, in the background")


if __name__ == "__main__":
    sys.exit(main())
