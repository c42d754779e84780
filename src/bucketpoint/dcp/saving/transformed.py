"""Upload of items through torch's stream transforms (compression, encryption), whose output has an unknown length.

Each group is one object, written item by item, so that memory stays within the budget. No part of such an item can be
read alone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.object_layout import ObjectPlace, group_items, resolve, torch_saved, warn_if_unsafe
from bucketpoint.format import keys
from bucketpoint.format.storage_info import make_storage_info, set_object_facts
from bucketpoint.format.tensor_bytes import copy_stretch, is_viewable, tensor_bytes
from bucketpoint.format.torch_zip import frameable, tensor_frame
from bucketpoint.stores import Store
from bucketpoint.transfer import Meter, StreamUpload, TransferOptions

_COPY_BYTES = 1 << 20
_GROWTH = 1.1
_SLACK = 1 << 16


class _Uncloseable(io.RawIOBase):
    """The object's stream as the transform of one item sees it.

    Closing a transform closes the stream that it wraps: here that must not end the object.
    """

    def __init__(self, stream: StreamUpload) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)


def transformed_paths(items: Sequence[WriteItem], place: ObjectPlace) -> list[str]:
    """Return the paths of the objects that `write_transformed` will write."""
    return [keys.data_path(place.token, place.rank, group, 0) for group in group_items(items, place.rules)]


def write_transformed(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    extensions: Sequence[Any],
    place: ObjectPlace,
    *,
    store: Store,
    options: TransferOptions,
    meter: Meter,
) -> list[WriteResult]:
    """Write all items through `extensions`, of which the first is nearest to the object."""
    # In the order in which a reader undoes the transforms: the one nearest to the object first. Torch's own writer
    # lists them the other way round, and its reader then cannot undo more than one.
    descriptors = [extension.get_descriptor() for extension in extensions]
    results: list[WriteResult] = []
    for group, members in group_items(items, place.rules).items():
        path = keys.data_path(place.token, place.rank, group, 0)
        data = [(item, resolve(item, planner)) for item in members]
        raw = sum(_nbytes(value) + _SLACK for _, value in data)
        first = len(results)
        with StreamUpload(
            store, keys.join(place.prefix, path), options, largest_nbytes=int(raw * _GROWTH), meter=meter
        ) as stream:
            for item, value in data:
                offset = stream.tell()
                target: Any = _Uncloseable(stream)
                for extension in extensions:
                    target = extension.transform_to(target)
                _write(item, value, target)
                target.close()
                length = stream.tell() - offset
                info = make_storage_info(
                    path,
                    offset,
                    length,
                    crc32c=stream.take_crc32c(),
                    transform_descriptors=descriptors,
                )
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
            done = stream.commit()
        set_object_facts(results[first].storage_data, size=done.size, etag=done.etag)
    return results


def _nbytes(value: torch.Tensor | memoryview) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else len(value)


def _write(item: WriteItem, value: torch.Tensor | memoryview, target: Any) -> None:
    if not isinstance(value, torch.Tensor):
        if item.type == WriteItemType.BYTE_IO:
            warn_if_unsafe(item.index.fqn, value)
        target.write(value)
        return
    if not frameable(value):
        target.write(torch_saved(value))
        return
    frame = tensor_frame(value.dtype, value.shape)
    target.write(frame.header)
    if is_viewable(value):
        view = tensor_bytes(value)
        for start in range(0, len(view), _COPY_BYTES):
            target.write(view[start : start + _COPY_BYTES])
    else:
        buffer = memoryview(bytearray(_COPY_BYTES))
        for start in range(0, frame.payload_nbytes, _COPY_BYTES):
            piece = buffer[: min(_COPY_BYTES, frame.payload_nbytes - start)]
            copy_stretch(value, start, piece)
            target.write(piece)
    target.write(frame.trailer)
