"""Train a small model, save it every few seconds, and expose bucketpoint's metrics to Prometheus.

    python examples/observability/demo.py                   # checkpoints go to a new folder
    python examples/observability/demo.py s3://bucket/run   # requests to a bucket are counted too

A save that fails is reported, and training continues: so a failing store can be seen on the dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from datetime import timedelta

import torch
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server
from torch.distributed.checkpoint.state_dict import get_state_dict

from bucketpoint import BucketpointError, CheckpointManager, RetentionPolicy
from bucketpoint.retention import Keep, Prune


def expose(port: int) -> None:
    """Serve the metrics of this process at http://127.0.0.1:PORT/metrics."""
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    # Prometheus on another machine needs an address that it can reach in place of this one.
    start_http_server(port, "127.0.0.1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="URL or folder of the run; default: a new folder")
    parser.add_argument("--port", type=int, default=9464)
    parser.add_argument("--saves", type=int, default=60)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between two saves")
    args = parser.parse_args()
    expose(args.port)

    root = args.root or tempfile.mkdtemp(prefix="bucketpoint-run-")
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    # Without the grace period of a day, so that the demo deletes checkpoints too.
    policy = RetentionPolicy(Keep(latest=3), prune=Prune(grace=timedelta(0)))
    with CheckpointManager(root, policy=policy) as manager:
        restored = manager.restore(state_of(model, optimizer))
        first = restored.step + 1 if restored else 1
        for step in range(first, first + args.saves):
            train(model, optimizer, args.pause)
            try:
                manager.save(step, state_of(model, optimizer))
                manager.wait()
                print(f"step {step} is committed to {root}", flush=True)
                if step % 5 == 0:  # So that loads have metrics too.
                    manager.restore(state_of(model, optimizer))
            except BucketpointError as error:
                print(f"step {step} was not saved: {error}", flush=True)
    print("The metrics can be read until the program is stopped.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seconds: float) -> None:
    """Train for so long: one step, and a pause in place of the others."""
    optimizer.zero_grad()
    model(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
    time.sleep(seconds)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


if __name__ == "__main__":
    main()
