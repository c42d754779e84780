"""State that is no tensor of a model or an optimizer, as one pickled item, and the checkpoint that a URL stands for."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from bucketpoint.catalog import latest_checkpoint
from bucketpoint.catalog.catalog import committed_info
from bucketpoint.errors import BucketpointError, UnsafeDataError
from bucketpoint.format import keys
from bucketpoint.integrations.saves import job_ranks
from bucketpoint.stores import open_store


class Pickled:
    """Values of a trainer, pickled by `torch.save` as one item of the checkpoint.

    Lightning does not say which values a checkpoint will hold, so that they cannot be loaded one by one in place.

    Attributes:
        value: what was loaded; None before.
    """

    def __init__(self, value: Any = None, *, trusted: bool = False) -> None:
        self.value = value
        self._trusted = trusted

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        try:
            torch.save(self.value, buffer)
        except Exception as error:
            raise BucketpointError(
                f"The trainer's state cannot be pickled: {error}",
                remedy="Leave the value out of what a `state_dict`, a callback, `on_save_checkpoint` or the "
                "hyperparameters give to a checkpoint",
            ) from error
        return {"pickled": buffer.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self.value = torch.load(io.BytesIO(state["pickled"]), map_location="cpu", weights_only=not self._trusted)
        except Exception as error:
            if self._trusted:
                raise
            raise UnsafeDataError(
                f"The trainer's state in the checkpoint has types that torch.load refuses: {error}",
                remedy="If you trust the checkpoint, give the strategy trusted=True, or load with weights_only=False; "
                "or add the types with torch.serialization.add_safe_globals",
            ) from error


def newest_of(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Return the URL if there is a checkpoint, and otherwise the newest whole one below it. All ranks."""

    def newest() -> str | None:
        store, key = open_store(url, storage_options=storage_options)
        # Checkpoints may lie within another: the one that was named is meant.
        if committed_info(store, keys.join(key, keys.METADATA)) is not None:
            return url
        found = latest_checkpoint(url, storage_options=storage_options)
        if found is None:
            _refuse_one_object(url, storage_options)
        return found

    call = f"the load of {url}"
    return job_ranks(call).on_coordinator(newest, call) or url


def _refuse_one_object(url: str, storage_options: Mapping[str, Any] | None) -> None:
    folder, _, name = url.rstrip("/").rpartition("/")
    try:
        store, key = open_store(folder, storage_options=storage_options)
        info = store.head(f"{key}/{name}" if key else name)
    except BucketpointError:
        # The load says what is wrong.
        return
    raise BucketpointError(
        f"There is one object of {info.size} bytes at this URL, and no checkpoint of several",
        url=url,
        remedy="A plain checkpoint of Lightning is loaded by Lightning's own strategies, with "
        "Trainer(plugins=[BucketCheckpointIO()]) from a bucket",
    )
