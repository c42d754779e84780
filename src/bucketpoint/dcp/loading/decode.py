"""Decoding of items that are read whole, and of chunks that can be read in part.

Read whole are bytes for the planner, frames of other writers, and transformed items. The elements of a chunk are copied
into a tensor, and dequantized.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint import LoadPlanner

from bucketpoint.errors import BucketpointError, CorruptDataError, MetadataError, MismatchError, UnsafeDataError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.pickles.items import may_be_archive, read_item, rewritten, settled
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError
from bucketpoint.format.tensor_bytes import Box, Runs, blocks_of, contiguous_strides, slice_runs
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
        tensor = settled(item.values[0])
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


# -- chunks that are read in part -------------------------------------------------------------------------------------

_PIECE = 1 << 16
"""Elements that are computed in one step, so that a step needs little memory in addition to the bytes in flight."""

# https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, 5.3.3
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@dataclass(frozen=True)
class SavedChunk:
    """A saved chunk whose raw elements can be read: their start in the object, and their layout."""

    payload_start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    storage_offset: int = 0

    @classmethod
    def of(cls, info: ItemInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> SavedChunk | None:
        """Return the chunk of an item's raw elements; None if the metadata does not contain their location."""
        if info.payload_offset is None or info.payload_nbytes is None or info.transform_descriptors:
            return None
        _, stored = cls.stored(((0,) * len(shape), shape))
        if math.prod(stored) * dtype.itemsize != info.payload_nbytes:
            return None
        start = info.offset + info.payload_offset
        return cls(start, info.payload_nbytes, dtype, shape, contiguous_strides(stored))

    @staticmethod
    def stored(box: Box) -> Box:
        """Return a box of the chunk in units of stored elements, rounded outwards."""
        return box

    @property
    def in_c_order(self) -> bool:
        steps = zip(self.shape, self.strides, contiguous_strides(self.shape), strict=True)
        return self.storage_offset == 0 and all(size == 1 or stride == step for size, stride, step in steps)

    def runs(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Runs:
        itemsize, origin = self.dtype.itemsize, self.storage_offset
        box = self.stored((offsets, lengths))
        return slice_runs(self.shape, *box, itemsize, strides=self.strides, storage_offset=origin)

    def fill(self, target: torch.Tensor, raw: torch.Tensor, box: Box) -> None:
        """Fill a tensor with the elements of a box from the bytes in `raw`."""
        if raw.data_ptr() % self.dtype.itemsize:
            raw = raw.clone()
        target.copy_(raw.view(self.dtype).as_strided(box[1], self.strides))


class Fp4Chunk(SavedChunk):
    """A saved chunk of 4-bit floats. A byte holds two neighbours in the last dimension, whose size is even."""

    @staticmethod
    def stored(box: Box) -> Box:
        return blocks_of(box, (*(1,) * (len(box[0]) - 1), 2))

    def fill(self, target: torch.Tensor, raw: torch.Tensor, box: Box) -> None:
        _unpack_fp4(target, raw.as_strided(self.stored(box)[1], self.strides), odd=box[0][-1] % 2)


def multiply(target: torch.Tensor, scales: torch.Tensor, offsets: Sequence[int], block: Sequence[int]) -> None:
    """Multiply the elements of a box, at `offsets` in the tensor, by the scales of their blocks, rounding once."""
    scales = scales.float()
    for at, part in _pieces(target, tuple(offsets)):
        factors = scales
        # Expand the last dimension first, because later copies of whole rows are cheap.
        for axis in reversed(range(part.dim())):
            start, size, step = at[axis], part.shape[axis], block[axis]
            first, stop = start // step, -(-(start + size) // step)
            factors = factors.narrow(axis, first - offsets[axis] // step, stop - first)
            if step > 1:
                factors = factors.repeat_interleave(step, axis).narrow(axis, start - first * step, size)
        part.mul_(factors.to(part.device))


def _unpack_fp4(target: torch.Tensor, packed: torch.Tensor, odd: int) -> None:
    """Fill a tensor with 4-bit floats, two in a byte, the first in the low bits. `odd`: 1 to skip the first float."""
    # One lookup of 8 bytes returns both values of a byte.
    pairs = [[low, high] for high in _FP4 for low in _FP4]
    table = torch.tensor(pairs, dtype=torch.float32, device="cpu").view(torch.int64).flatten()
    for at, part in _pieces(target, (*(0,) * (target.dim() - 1), odd)):
        box = blocks_of((at, tuple(part.shape)), (*(1,) * (part.dim() - 1), 2))
        some = packed[tuple(slice(start, start + size) for start, size in zip(*box, strict=True))]
        values = table.index_select(0, some.flatten().int()).reshape(some.shape).view(torch.float32)
        part.copy_(values.narrow(-1, at[-1] % 2, part.shape[-1]))


def _pieces(tensor: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a tensor that begins at `offsets` into pieces; yield the offsets of each piece, and the piece."""
    if tensor.numel() <= _PIECE:
        yield offsets, tensor
        return
    axis = max(range(tensor.dim()), key=lambda axis: tensor.shape[axis])
    half = tensor.shape[axis] // 2
    after = (*offsets[:axis], offsets[axis] + half, *offsets[axis + 1 :])
    yield from _pieces(tensor.narrow(axis, 0, half), offsets)
    yield from _pieces(tensor.narrow(axis, half, tensor.shape[axis] - half), after)
