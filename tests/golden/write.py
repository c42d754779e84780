"""Writes the golden checkpoints of the version that is installed: run it once for a release, and commit the files.

    cd tests && ../.venv/bin/python -m golden.write

They are saved to an S3 server and copied from there, byte by byte, to `tests/golden/VERSION`; `expected.json` has what
was saved. A folder that is there is never written again: it is what that version wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

import bucketpoint
from bucketpoint import BucketWriter, CheckpointManager, RetentionPolicy, SavePlanner
from bucketpoint.catalog import notes
from bucketpoint.dcp.saving import unchanged
from bucketpoint.format.record import DeletionMarker
from bucketpoint.retention import Keep, Prune
from dcp.ranks import Ranks
from golden.states import flat, plain_state, save_sharded, small_formats
from kit import servers
from kit.servers import S3Server

BUCKET = "golden"
HERE = Path(__file__).resolve().parent


def save(server: S3Server, ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Save every form, and return the descriptions of what each checkpoint holds, by name, by its folder."""
    expected: dict[str, dict[str, Any]] = {}
    options = server.options

    def save_alone(name: str, state: dict[str, Any], **arguments: Any) -> None:
        writer = BucketWriter(storage_options=options, **arguments)
        url = server.url(BUCKET, name)
        dcp.save(state, checkpoint_id=url, storage_writer=writer, planner=SavePlanner(), no_dist=True)
        expected[name] = flat(state)

    def save_together(name: str, **arguments: Any) -> list[dict[str, Any]]:
        indexed, collectives = arguments.get("indexed", False), arguments.get("collectives", True)
        return ranks.run(save_sharded, server.url(BUCKET, name), options, indexed, collectives)

    small_formats(indexed=False)
    save_alone("plain", plain_state())
    save_alone("zstd", {"model": {"w": torch.arange(600.0).reshape(20, 30)}, "step": 3}, _extensions=[ZStandard()])
    small_formats(indexed=True)
    save_alone("index", plain_state())
    for name, indexed in (("ranks", False), ("ranks-index", True)):
        expected[name] = {key: value for each in save_together(name, indexed=indexed) for key, value in each.items()}
    for rank, mine in enumerate(save_together("no-collectives", collectives=False)):
        expected[f"no-collectives/__{rank}"] = mine
    small_formats(indexed=False)
    expected |= save_run(server)
    marker = DeletionMarker("0123456789ab", 1.7e9, "a policy", ("0123456789ab",))
    server.client().put_object(Bucket=BUCKET, Key="deleted/.metadata", Body=marker.encode())
    return expected


def save_run(server: S3Server) -> dict[str, dict[str, Any]]:
    """Save a run with a catalog: two steps, of which the second has a copied object, metrics, and a pin."""
    unchanged.LEAST_COPIED_BYTES = 1
    policy = RetentionPolicy(Keep(latest=5), prune=Prune(when="manual"))
    expected = {}
    with CheckpointManager(
        server.url(BUCKET, "run"), policy=policy, storage_options=server.options, unchanged="copy", git_sha="f00d"
    ) as manager:
        for step in (1, 2):
            moving = torch.full((20, 30), float(step), dtype=torch.bfloat16)
            state = {"model": {"frozen": torch.arange(600.0)}, "optim": {"w": moving}, "step": step}
            handle = manager.save(step, state, metrics={"loss": 1 / step})
            assert handle is not None
            handle.result()
            expected[f"run/step-{step}"] = flat(state)
        manager.report(1, {"eval": float("nan")})
        notes.pin(manager.catalog, 1, reason="golden", author="golden")
    return expected


def main() -> None:
    """Write the goldens of this version."""
    target = HERE / ".".join(bucketpoint.__version__.split(".")[:2])
    if target.exists():
        raise SystemExit(f"{target} is there: goldens are what that version wrote, and stay as they are")
    with Ranks(4) as ranks, servers.moto() as server:
        server.client().create_bucket(Bucket=BUCKET)
        expected = save(server, ranks)
        for key in server.keys(BUCKET):
            path = target / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(server.client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    (target / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
