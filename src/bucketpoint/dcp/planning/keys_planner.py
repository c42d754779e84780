"""`KeysPlanner`: load planner that creates the state from the keys of the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from bucketpoint.dcp.planning.load_planner import LoadPlanner, url_of
from bucketpoint.dcp.planning.nested_state import nested, noted_int_keys
from bucketpoint.errors import BucketpointError, MismatchError
from bucketpoint.format.name_patterns import matching


class KeysPlanner(LoadPlanner):
    """Load planner that creates a state for the requested keys of a checkpoint, and loads into it.

    Args:
        keys: `fnmatch` patterns on the flat names of the checkpoint, such as `"model.*"`; a pattern without wildcards
            also matches every name below it. None for all keys.
        device: device of the tensors.
    """

    def __init__(self, keys: str | Iterable[str] | None = None, device: Any = "cpu") -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._patterns = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
        self._device = _usable(device)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill the state, which must be empty, with tensors to load into."""
        assert metadata is not None
        for fqn in self._wanted_names(metadata):
            entry = metadata.state_dict_metadata[fqn]
            state_dict[fqn] = self._empty(fqn, entry) if isinstance(entry, TensorStorageMetadata) else None
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state, with its tensors on `device`."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location=self._device, weights_only=False)
        self._note(read_item)

    def loaded(self) -> dict[Any, Any]:
        """Return the nested state, once the load is complete."""
        assert self.metadata is not None
        url = url_of(self.metadata)
        return nested(self.state_dict, self.metadata, noted_int_keys(self.metadata, url=url), url=url)

    def _compare(self, plans: list[LoadPlan]) -> None:
        """Do nothing: the caller has selected the keys, so unused keys are expected."""

    def _wanted_names(self, metadata: Metadata) -> list[str]:
        names = list(metadata.state_dict_metadata)
        if self._patterns is None:
            return names
        wanted = matching(self._patterns, names, url=url_of(metadata))
        return [name for name in names if name in wanted]

    def _empty(self, fqn: str, entry: TensorStorageMetadata) -> torch.Tensor:
        properties = entry.properties
        try:
            if str(properties.dtype).startswith(("torch.qint", "torch.quint")):
                # The quantiser is a placeholder: the load replaces it by the saved tensor's.
                return torch._empty_affine_quantized(
                    entry.size, scale=1.0, zero_point=0, dtype=properties.dtype, device=self._device
                )
            return torch.empty(entry.size, dtype=properties.dtype, layout=properties.layout, device=self._device)
        except (RuntimeError, TypeError) as error:
            raise MismatchError(
                f"A {properties.dtype} tensor of {list(entry.size)} cannot be allocated on {self._device}: {error}",
                key=fqn,
                remedy="Exclude the tensor with keys=, or load into a state that you allocate",
            ) from error


def _usable(device: Any) -> torch.device:
    """Return the `torch.device`; raise BucketpointError if torch or this machine has no such device."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise BucketpointError(
            f"device={device!r} cannot be used: {reason}",
            remedy='Pass device="cpu", or another device of torch that this machine has',
        ) from error
    return found
