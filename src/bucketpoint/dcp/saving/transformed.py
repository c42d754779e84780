"""Upload of items through torch's stream transforms (compression, encryption), whose output has an unknown length.

Each group is one object, written item by item, so that memory stays within the budget. Such an item can be read only
as a whole.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import SavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.saving.object_layout import item_segments, resolve, results_with
from bucketpoint.format import keys
from bucketpoint.format.storage_info import make_storage_info
from bucketpoint.stores import Store
from bucketpoint.transfer import Meter, TransferOptions
from bucketpoint.transfer.stream import StreamUpload

_COPY_BYTES = 1 << 20
_GROWTH = 1.1
_SLACK = 1 << 16


class _ItemStream(io.RawIOBase):
    """Stream of one item, written to the stream of its object.

    A transform closes the stream that it wraps, and may check that the stream is closed. The object's stream must stay
    open for further items.
    """

    def __init__(self, stream: StreamUpload) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)


def write_transformed(
    groups: Mapping[str, Sequence[WriteItem]],
    planner: SavePlanner,
    extensions: Sequence[Any],
    prefix: str,
    *,
    store: Store,
    options: TransferOptions,
    meter: Meter,
) -> list[WriteResult]:
    """Write all items through `extensions`, the first of which writes to the object. `groups`: items by path."""
    # Listed in the order in which a reader undoes the transforms, beginning at the object. Torch's writer lists them in
    # the reverse order, so torch's reader cannot undo more than one.
    descriptors = [extension.get_descriptor() for extension in extensions]
    results: list[WriteResult] = []
    for path, members in groups.items():
        data = [(item, resolve(item, planner)) for item in members]
        raw = sum(_nbytes_of(value) + _SLACK for _, value in data)
        infos = []
        with StreamUpload(
            store, keys.join(prefix, path), options, largest_nbytes=int(raw * _GROWTH), meter=meter
        ) as stream:
            for item, value in data:
                offset = stream.tell()
                target: Any = _ItemStream(stream)
                for extension in extensions:
                    target = extension.transform_to(target)
                _write(item, value, target)
                target.close()
                info = make_storage_info(
                    path,
                    offset,
                    stream.tell() - offset,
                    crc32c=stream.take_crc32c(),
                    transform_descriptors=descriptors,
                )
                infos.append((item.index, info))
            results += results_with(infos, stream.commit())
    return results


def _nbytes_of(value: torch.Tensor | memoryview) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else len(value)


def _write(item: WriteItem, value: torch.Tensor | memoryview, target: Any) -> None:
    for segment in item_segments(item, value):
        for start in range(0, segment.nbytes, _COPY_BYTES):
            target.write(segment.read(start, min(start + _COPY_BYTES, segment.nbytes)))
