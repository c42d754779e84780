"""Decoding of items that are read whole: bytes for the planner, frames of other writers, and transformed items."""

from __future__ import annotations

import io
from typing import Any, cast

import torch
from torch.distributed.checkpoint import LoadPlanner

from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, MismatchError, UnsafeDataError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.pickles.archive import may_be_archive
from bucketpoint.format.pickles.items import read_item
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError
from bucketpoint.format.pickles.writing import rewritten, settled
from bucketpoint.format.torch_zip import PROBE_BYTES, probe_frame

FRAME_BYTES = 1 << 20
"""Limit on the bytes that torch.save adds to a tensor; it adds a few kilobytes to any tensor that DCP saves."""

FREE_BYTES, MOST_GROWTH = 64 << 20, 64
"""Limit on a byte item after its transforms are undone, because its size is not recorded: the larger of FREE_BYTES and
MOST_GROWTH x stored length. zstd compresses real states 2 to 10 times, and a decompression bomb 30,000 times."""

_PIECE_BYTES = 1 << 20


def decode_item(
    view: memoryview,
    info: ItemInfo,
    transforms: Any,
    *,
    key: str,
    tensor_nbytes: int | None = None,
    trusted: bool = False,
) -> torch.Tensor:
    """Return the tensor in a whole item. The tensor may share the memory of `view`, which the caller may reuse later.

    Args:
        tensor_nbytes: bytes of the saved chunk by its shape and dtype, which limit the item after its transforms are
            undone; None for the limit of a byte item.
        trusted: unpickle without restrictions an item that is not a plain tensor.

    Raises:
        CorruptDataError, UnsafeDataError: the item exceeds the limit after its transforms are undone.
        UnsafeDataError: the item needs `trusted`.
        MetadataError: the item is not a tensor saved by torch.save.
    """
    view = without_transforms(view, info, transforms, key=key, tensor_nbytes=tensor_nbytes)
    probe = probe_frame(bytes(view[:PROBE_BYTES]))
    if probe is not None and 0 < probe.payload_nbytes <= len(view) - probe.payload_offset:
        raw = torch.frombuffer(view, dtype=torch.uint8, offset=probe.payload_offset, count=probe.payload_nbytes)
        flat = (raw.clone() if raw.data_ptr() % probe.dtype.itemsize else raw).view(probe.dtype)
        return flat.as_strided(tuple(probe.shape), tuple(probe.stride), probe.storage_offset)
    if trusted:
        return cast(torch.Tensor, torch.load(io.BytesIO(view), map_location="cpu", weights_only=False))
    try:
        item = read_item(bytes(view))
        tensor = settled(item.values[0]) if item.deferred else item.values[0]
    except RefusedError as error:
        raise UnsafeDataError(f"The item is not a plain tensor: it contains {error}", key=key) from None
    except UnreadableError as error:
        raise MetadataError(f"The item is not an archive of torch.save: {error}", key=key) from None
    if not item.saved or not isinstance(tensor, torch.Tensor):
        raise MetadataError("The item is not a tensor saved by torch.save", key=key)
    return tensor


def fill_tensor(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy a decoded tensor into the target, which may be sparse, with other indices than the saved tensor.

    A quantised target gets the quantiser of the saved tensor, because the integers have no meaning without it.

    Raises:
        MismatchError: the target is a part of a quantised tensor with another quantiser than the saved one.
    """
    with torch.no_grad():
        if target.is_quantized and saved.is_quantized:
            if target._is_view():
                # The quantiser of the whole tensor cannot be set through a view.
                target.detach().copy_(saved)
                if not torch.equal(target, saved):
                    raise MismatchError(
                        "The tensor to load into has another quantiser than the saved one, which was saved in parts",
                        remedy="Quantise the tensor to load into as the saved one, with its scale and zero point",
                    )
            elif target.qscheme() == saved.qscheme():
                target.copy_(saved)
            else:
                target.data = saved.to(target.device, copy=True)
            return
        if saved.layout is not torch.strided and saved.layout is not target.layout:
            saved = saved.to_dense()
        if target.layout not in (torch.strided, torch.sparse_coo):
            target.resize_as_sparse_(saved)
        target.copy_(saved)


def load_bytes(
    view: memoryview, info: ItemInfo, transforms: Any, *, key: str, trusted: bool, planner: LoadPlanner
) -> bytes:
    """Return the bytes of an item for the planner.

    The planner's `torch.load` is unrestricted, so unless trusted the item is parsed safely and pickled again.

    Raises:
        UnsafeDataError: the pickle names something outside the allow-list (nothing was run), or the item exceeds the
            limit after its transforms are undone.
    """
    data = bytes(without_transforms(view, info, transforms, key=key, trusted=trusted))
    if trusted:
        return data
    try:
        return rewritten(read_item(data))
    except RefusedError as error:
        raise UnsafeDataError(f"The pickle of the item names {error}", key=key) from None
    except UnreadableError:
        # A custom planner may decode bytes that are not a pickle. But the planners of torch and of bucketpoint unpickle
        # all bytes, and Python may accept a pickle that our reader does not recognise. So refuse for these planners.
        unpickles = type(planner).load_bytes.__module__.partition(".")[0] in ("torch", "bucketpoint")
        if not unpickles and not may_be_archive(data):
            return data
        raise UnsafeDataError("The item is not in the format of torch.save", key=key) from None


def without_transforms(
    view: memoryview,
    info: ItemInfo,
    transforms: Any,
    *,
    key: str,
    tensor_nbytes: int | None = None,
    trusted: bool = False,
) -> memoryview:
    """Undo the transforms of an item. The memory of the result exceeds the limit by at most one piece.

    Args:
        tensor_nbytes: as for `decode_item`.
        trusted: set no limit.

    Raises:
        CorruptDataError, UnsafeDataError: a tensor's item (or a byte item, respectively) exceeds the limit.
        BucketpointError: a transform is not registered here.
        MetadataError: a transform cannot be undone.
    """
    if not info.transform_descriptors:
        return view
    most = max(FREE_BYTES, MOST_GROWTH * info.length) if tensor_nbytes is None else tensor_nbytes + FRAME_BYTES
    try:
        extensions = transforms.from_descriptor_list(list(info.transform_descriptors))
    except ValueError as error:
        raise BucketpointError(
            f"The item was saved with a transform that is not registered in this process: {error}",
            key=key,
            remedy="Install the package of the transform (zstandard for stream.zstd), or pass _extension_registry=",
        ) from None
    stream: Any = io.BytesIO(view)
    data = bytearray()
    try:
        for extension in extensions:
            stream = extension.transform_from(stream)
        while piece := stream.read(_PIECE_BYTES):
            data += piece
            if len(data) > most and not trusted:
                raise (UnsafeDataError if tensor_nbytes is None else CorruptDataError)(
                    f"The item has {info.length} bytes, but more than {most} after its transforms are undone", key=key
                )
    except BucketpointError:
        raise
    except Exception as error:  # noqa: BLE001 (a transform may raise any error, which must be raised with the key)
        raise MetadataError(
            f"The transforms of the item cannot be undone: {type(error).__name__}: {error}"[:400], key=key
        ) from None
    return memoryview(data)
