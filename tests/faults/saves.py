"""The save that is killed, starved and cut off, what is loaded afterwards, and what may lie in the bucket then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from background import choose_uploads
from bucketpoint import BucketReader, BucketWriter, TransferOptions
from bucketpoint.catalog.catalog import Catalog, open_catalog
from bucketpoint.catalog.deletion.sweep import sweep
from bucketpoint.catalog.save_log import SaveLog
from bucketpoint.checkpoint.open import open_checkpoint
from bucketpoint.checkpoint.verify import verify
from bucketpoint.dcp.writer import Unchanged
from bucketpoint.errors import CheckpointNotFoundError, IncompleteCheckpointError
from bucketpoint.format import catalog_keys, keys
from bucketpoint.format.catalog_keys import CommitKey
from bucketpoint.location import Location
from bucketpoint.transfer.options import Background
from kit.proxied_connection import RecordedRequest
from services import Server

# A rank that is killed is forked from a process that has no tests, and imports this module for what it does.
choose_uploads()

STEP = 7

LARGE = (5 << 20) + 1000
"""Bytes: an upload in parts, and as small as S3 lets one be."""

FROZEN = 2 << 20
"""Bytes of what a save with copies never changes: an object of its own from the second save on."""

OPTIONS = TransferOptions(part_bytes=5 << 20, connections=2, single_put_bytes=1 << 20)
DAYS_S = 3 * 86400.0

slow_on_gcs = pytest.mark.parametrize("server", ["minio", pytest.param("gcs", marks=pytest.mark.slow)], indirect=True)
"""For tests of minutes: what stands still or dies in them is a rank, whatever the store."""


def state(world: int, value: int, *, own: int | None = None) -> dict[str, Any]:
    """All of one value: what every rank has, and what rank `own` (None: all of them) has for itself."""
    ranks = range(world) if own is None else [own]
    return {
        "model": {f"large_{rank}": torch.full((LARGE,), value, dtype=torch.uint8) for rank in ranks},
        "optim": {f"small_{rank}": torch.full((100,), float(value)) for rank in ranks}
        | {"shared": torch.ones(3) * value},
        "value": value,
    }


@dataclass(frozen=True)
class Place:
    """A run of one checkpoint, and how to reach it; `copies`: saves have the store copy what did not change."""

    server: Server
    bucket: str
    name: str
    world: int
    copies: bool = False

    @property
    def root(self) -> str:
        return self.server.url(self.bucket, self.name)

    @property
    def url(self) -> str:
        return f"{self.root}/step-{STEP}"

    def through(self, endpoint: str) -> Place:
        return replace(self, server=self.server.at(endpoint))

    def catalog(self, **options: Any) -> Catalog:
        return open_catalog(Location.of(self.root, {**self.server.options, **options}))

    def writer(self, *, overwrite: bool = True, background: Background = "auto", **options: Any) -> BucketWriter:
        log, storage = SaveLog(self.catalog(**options)), {**self.server.options, **options}
        transfer = replace(OPTIONS, background=background)
        unchanged: Unchanged = "copy" if self.copies else "send"
        options = {"storage_options": storage, "transfer": transfer, "overwrite": overwrite, "unchanged": unchanged}
        return BucketWriter.of_run(self.url, log, **options)

    def state(self, value: int, *, own: int | None = None) -> dict[str, Any]:
        """As `state`; with copies, also what every rank has and never changes."""
        frozen = {"frozen": torch.arange(FROZEN, dtype=torch.uint8)} if self.copies else {}
        return state(self.world, value, own=own) | frozen

    def save(self, value: int, *, planner: Any = None, **options: Any) -> None:
        """Of all ranks' items, in this process."""
        dcp.save(self.state(value), storage_writer=self.writer(**options), planner=planner, no_dist=True)

    def load(self, *, verified: bool = False) -> int | None:
        """The one value of everything in the checkpoint; None if there is none."""
        target = self.state(0)
        if self.copies:
            target["frozen"].zero_()
        reader = BucketReader(self.url, storage_options=self.server.options, transfer=OPTIONS)
        try:
            dcp.load(target, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as failure:
            errors = [error for error, _ in failure.failures.values()]
            assert all(isinstance(one, (CheckpointNotFoundError, IncompleteCheckpointError)) for one in errors), errors
            return None
        assert not self.copies or torch.equal(target["frozen"], self.state(0)["frozen"])
        tensors = [*target["model"].values(), *target["optim"].values()]
        # Not `unique`, which sorts.
        ends = [end.item() for tensor in tensors for end in (tensor.min(), tensor.max())]
        values = {*ends, target["value"]}
        assert len(values) == 1, f"a mix of {sorted(values)}"
        if verified:
            found = verify(open_checkpoint(Location.of(self.url, self.server.options)))
            assert found.ok, found.damage
        return int(values.pop())

    def sweep(self) -> None:
        """`bucketpoint gc`, some days later."""
        catalog = replace(self.catalog(), now=time.time() + DAYS_S)
        swept = sweep(catalog)
        assert not swept.failures

    def litter(self, exchanges: Sequence[RecordedRequest]) -> list[str]:
        """What lies there and belongs to no checkpoint.

        Uploads are asked for by the exact keys that were seen, as MinIO lists them by nothing else.
        """
        store = self.catalog().store
        below, folder = f"{self.name}/", f"{self.name}/step-{STEP}/"
        there = {info.key for info in store.list(below)}
        named: set[str] = set()
        try:
            saved = open_checkpoint(Location.of(self.url, self.server.options))
            named = {folder + path for path in saved.by_object} | {folder + keys.METADATA, folder + keys.RECORD}
        except CheckpointNotFoundError:
            pass
        records = {key for key in there if f"/{catalog_keys.STEPS}/" in key and CommitKey.parse(key.rpartition("/")[2])}
        begun = {one.request.key for one in exchanges if one.request.kind == "CreateMultipartUpload"}
        prefixes = {below} if store.capabilities.lists_uploads else begun
        uploads = {f"upload of {one.key}" for prefix in prefixes for one in store.list_multipart(prefix)}
        return sorted(there - named - records) + sorted(uploads)


def save_beside(rank: int, world: int, place: Place, value: int, executor: str) -> None:
    """One rank's share of an asynchronous save, waited for.

    The executor HELPER is a thread with a helper process, COPY a thread of which saves copy what did not change.
    """
    writer = place.writer(**place.server.attempts(2), background="process" if executor == "HELPER" else "auto")
    future = dcp.async_save(
        place.state(value, own=rank),
        storage_writer=writer,
        async_checkpointer_type=AsyncCheckpointerType["PROCESS" if executor == "PROCESS" else "THREAD"],
    )
    future.result()  # type: ignore[union-attr]


def committed(exchanges: Sequence[RecordedRequest]) -> bool:
    """Whether the store took the commit, as its answers say. They may have reached nobody.

    GCS's uploads say their key in their body. Of those with a condition the commit is the first.
    """
    return any(
        one.request.kind == "PutObject"
        and one.status == 200
        and (one.request.key.endswith("/" + keys.METADATA) or "ifGenerationMatch" in one.request.target)
        for one in exchanges
    )
