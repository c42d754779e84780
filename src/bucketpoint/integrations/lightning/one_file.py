"""`BucketCheckpointIO`, a plugin for plain checkpoints, of one file each, in a bucket."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO

from bucketpoint.errors import BucketpointError
from bucketpoint.stores import open_store
from bucketpoint.transfer import BufferPool, Meter, ObjectSource, Segment, TransferOptions, upload_objects


class BucketCheckpointIO(CheckpointIO):
    """Plugin for plain, unsharded checkpoints of Lightning and Fabric: each is one object, written by `torch.save`.

    The object appears whole or not at all. `Trainer(plugins=[BucketCheckpointIO()])` saves with Lightning's own
    strategies, while training waits.

    Args:
        storage_options: as for `BucketWriter`.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self._storage_options = storage_options

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint. `storage_options` replace those of the plugin."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        data = buffer.getbuffer()
        store, key = open_store(path, storage_options=storage_options or self._storage_options)
        options = TransferOptions()
        source = ObjectSource(key, (Segment(len(data), data),))
        pool = BufferPool(options.max_inflight_bytes)
        upload_objects(store, [source], options, pool=pool, meter=Meter("write", os.fspath(path), len(data), None))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint as `torch.load` does."""
        store, key = open_store(path, storage_options=self._storage_options)
        data, _ = store.get(key)
        loaded: dict[str, Any] = torch.load(
            io.BytesIO(data), map_location=map_location or "cpu", weights_only=weights_only
        )
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint, if there is one."""
        store, key = open_store(path, storage_options=self._storage_options)
        for failure in store.delete([key]):
            raise BucketpointError(f"The checkpoint cannot be deleted: {failure}", url=os.fspath(path))
