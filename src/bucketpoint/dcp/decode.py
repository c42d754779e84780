"""Items that are taken whole: bytes for the planner, frames of other writers, and what went through a transform."""

from __future__ import annotations

import io
import pickle
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlanner

from bucketpoint.errors import BucketpointError, MetadataError, UnsafeDataError
from bucketpoint.format.frames import PROBE_BYTES, probe_frame
from bucketpoint.format.safe_pickle import refused_globals
from bucketpoint.format.storage_info import ItemInfo


def decode_item(view: memoryview, info: ItemInfo, transforms: Any, *, key: str) -> torch.Tensor:
    """The tensor in a whole item. It may share the memory of `view`, which is valid during the call alone."""
    if info.transform_descriptors:
        view = memoryview(bytearray(undo_transforms(view, info, transforms, key=key)))
    probe = probe_frame(bytes(view[:PROBE_BYTES]))
    if probe is not None and 0 < probe.payload_nbytes <= len(view) - probe.payload_offset:
        raw = torch.frombuffer(view, dtype=torch.uint8, offset=probe.payload_offset, count=probe.payload_nbytes)
        flat = (raw.clone() if raw.data_ptr() % probe.dtype.itemsize else raw).view(probe.dtype)
        return flat.as_strided(tuple(probe.shape), tuple(probe.stride), probe.storage_offset)
    try:
        return cast(torch.Tensor, torch.load(io.BytesIO(view), map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise UnsafeDataError(f"This item is no plain tensor, and a safe load refuses it: {error}", key=key) from None
    except Exception as error:  # noqa: BLE001 - damaged pickles make torch's unpickler raise nearly everything
        reason = f"{type(error).__name__}: {error}"[:300]
        raise MetadataError(f"This item is no tensor that torch can read: {reason}", key=key) from None


def load_bytes(
    view: memoryview, info: ItemInfo, transforms: Any, *, key: str, trusted: bool, planner: LoadPlanner
) -> bytes:
    """The bytes of an item, once it is known that the planner's unrestricted `torch.load` can do no harm with them.

    Raises:
        UnsafeDataError: they name something outside the allow-list; nothing was run.
    """
    data = undo_transforms(view, info, transforms, key=key) if info.transform_descriptors else bytes(view)
    if trusted:
        return data
    refused = refused_globals(data)
    if refused is None:
        # No pickle of any kind. A planner that reads bytes its own way may have them; torch.load may not.
        if type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            return data
        raise UnsafeDataError("This item is not in torch.save's format", key=key)
    if refused:
        raise UnsafeDataError(f"This item names {', '.join(refused)}", key=key)
    return data


def undo_transforms(view: memoryview, info: ItemInfo, transforms: Any, *, key: str) -> bytes:
    """Run an item through the transforms that its descriptors name.

    Raises:
        BucketpointError: a transform is not registered here.
    """
    try:
        extensions = transforms.from_descriptor_list(list(info.transform_descriptors or ()))
    except ValueError as error:
        raise BucketpointError(
            f"This item was transformed when it was saved, and the transform is not known here: {error}",
            key=key,
            remedy="Install it (zstandard for stream.zstd) or pass _extension_registry=",
        ) from None
    stream: Any = io.BytesIO(view)
    for extension in extensions:
        stream = extension.transform_from(stream)
    return cast(bytes, stream.read(-1))
