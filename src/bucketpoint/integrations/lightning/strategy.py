"""Base of strategies with checkpoints at URLs, for a `Trainer` and for a `Fabric`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bucketpoint.dcp.writer import BucketWriter
from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.parts import Pickled
from bucketpoint.integrations.saves import Saves, checkpoint_at
from bucketpoint.stores import open_store


class UrlStrategy:
    """Base of strategies with checkpoints at URLs. Must be listed before Lightning's own class among the bases."""

    def __init__(
        self, *args: Any, storage_options: Mapping[str, Any] | None = None, trusted: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._reading: dict[str, Any] = {"storage_options": storage_options, "trusted": trusted}
        self._saves = Saves(BucketWriter(storage_options=storage_options))

    def wait(self) -> None:
        """Wait until the last save is committed. Raises BucketpointError if the save failed."""
        self._saves.wait()

    def _url_to_save(self: Any, path: Any, storage_options: Any) -> str:
        """Return the URL of rank 0 on all ranks."""
        if storage_options is not None:
            raise BucketpointError(
                "A save takes no storage_options",
                remedy="Give them to the strategy: bucket_strategy(DDPStrategy, storage_options=...)",
            )
        return str(self.broadcast(path))

    def _url_to_load(self: Any, path: Any) -> str:
        """Return the URL of the checkpoint at `path`, or else of the newest whole one below it."""
        url, options = str(self.broadcast(path)), self._reading["storage_options"]
        found = checkpoint_at(url, options)
        if found is None:
            _refuse_one_object(url, options)
        return found or url

    def _pickled(self, weights_only: bool | None) -> Pickled:
        return Pickled(trusted=self._reading["trusted"] if weights_only is None else not weights_only)


def _refuse_one_object(url: str, storage_options: Mapping[str, Any] | None) -> None:
    folder, _, name = url.rstrip("/").rpartition("/")
    try:
        store, key = open_store(folder, storage_options=storage_options)
        info = store.head(f"{key}/{name}" if key else name)
    except BucketpointError:
        # The load itself raises the error.
        return
    raise BucketpointError(
        f"This URL holds a single object of {info.size} bytes, not a checkpoint of several",
        url=url,
        remedy="A plain checkpoint of Lightning is loaded by Lightning's own strategies, with "
        "Trainer(plugins=[BucketCheckpointIO()]) from a bucket",
    )
