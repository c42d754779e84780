"""Translation of DCP's read items to extents: byte ranges of objects, their targets, and the checksums to verify."""

from __future__ import annotations

import io
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlanner, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from bucketpoint.checkpoint.chunk import PlannedItem, SavedChunk, tensor_over
from bucketpoint.checkpoint.regions import ChunkShapes
from bucketpoint.dcp.loading.decode import decode_item, fill_tensor, load_bytes
from bucketpoint.errors import MetadataError, MismatchError
from bucketpoint.format import keys
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.slicing import Runs, slice_runs
from bucketpoint.format.storage_info import read_storage_info
from bucketpoint.format.tensor_bytes import is_viewable, tensor_bytes
from bucketpoint.format.torch_zip import contiguous_strides
from bucketpoint.transfer import Block, Extent, TransferOptions, Whole

Deliver = Callable[[memoryview | None], None]


class ReadPlan:
    """Translator of one rank's items to extents; it commits each item to the planner once all of it has arrived.

    The planner is called by one thread at a time, as planners are not written for several.
    """

    def __init__(
        self,
        metadata: Metadata,
        planner: LoadPlanner,
        *,
        prefix: str,
        etags: dict[str, str],
        options: TransferOptions,
        transforms: Any,
        trusted: bool,
    ) -> None:
        self._metadata = metadata
        self._planner = planner
        self._prefix = prefix
        self._etags = etags
        self._options = options
        self._transforms = transforms
        self._trusted = trusted
        self._lock = threading.Lock()
        self._shapes = ChunkShapes(metadata)

    def resolve(self, items: Sequence[ReadItem]) -> list[PlannedItem]:
        """Find every item in the metadata, and the tensor to load it into.

        Raises:
            MetadataError: the metadata names no data for an item.
            MismatchError: the planner's tensor is not of the size that the planner asked for.
        """
        storage_data: dict[MetadataIndex, Any] = self._metadata.storage_data or {}
        resolved = []
        for item in items:
            found = storage_data.get(item.storage_index)
            if found is None:
                raise MetadataError("The metadata names no data for this item", key=item.storage_index.fqn)
            info = read_storage_info(found)
            target = None
            if item.type != LoadItemType.BYTE_IO:
                target = self._planner.resolve_tensor(item)
                # A sparse tensor is not detached: only the tensor itself can be given another set of elements.
                target = target.detach() if target.layout is torch.strided else target
                if tuple(target.shape) != tuple(item.lengths):
                    raise MismatchError(
                        f"The planner requested {list(item.lengths)} but passed a tensor of shape {list(target.shape)}",
                        key=item.dest_index.fqn,
                    )
            resolved.append(PlannedItem(item, info, keys.join(self._prefix, info.path), target))
        return resolved

    def chunk_of(self, item: PlannedItem) -> SavedChunk | None:
        """Return the place of the raw elements of the item's saved chunk; None if the metadata does not tell it."""
        info = item.info
        if info.payload_offset is None or info.payload_nbytes is None or info.transform_descriptors:
            return None
        entry = self._metadata.state_dict_metadata.get(item.read.storage_index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        shape = self._shapes.of(item.read.storage_index)
        if shape is None or math.prod(shape) * entry.properties.dtype.itemsize != info.payload_nbytes:
            return None
        start = info.offset + info.payload_offset
        return SavedChunk(start, info.payload_nbytes, entry.properties.dtype, shape, contiguous_strides(shape))

    def needs_probe(self, item: PlannedItem) -> bool:
        """Return True if the item is a frame of a foreign writer that is wanted in part, or too large to read whole."""
        if item.target is None or item.info.payload_offset is not None or item.info.transform_descriptors:
            return False
        if item.info.crc32c is not None:
            return False
        entry = self._metadata.state_dict_metadata.get(item.read.storage_index.fqn)
        wanted = (
            item.target.numel() * entry.properties.dtype.itemsize if isinstance(entry, TensorStorageMetadata) else 0
        )
        return item.info.length > self._options.lease_bytes or wanted * 2 < item.info.length

    def extents(self, item: PlannedItem, chunk: SavedChunk | None) -> Iterator[Extent]:
        """Return the byte ranges that one item needs.

        `chunk` comes from the metadata or from a probe; None: read the item whole.
        """
        if chunk is None:
            yield self._whole(item)
            return
        assert item.target is not None
        if item.target.numel() == 0:
            self._commit(item)
            return
        read = item.read
        offsets, lengths = tuple(read.storage_offsets), tuple(read.lengths)
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, lengths, chunk.shape, strict=True)):
            raise MismatchError(
                f"The planner requested {list(lengths)} at {list(offsets)} of a chunk of shape {list(chunk.shape)}",
                key=read.storage_index.fqn,
            )
        pieces = list(self._split(item, chunk, offsets, lengths))
        done = self._when_all(item, len(pieces))
        whole = self._as_a_whole(item.info)
        for piece_offsets, piece_lengths in pieces:
            for extent in self._piece(item, chunk, piece_offsets, piece_lengths, done):
                yield extent if whole is None else replace(extent, part_of=whole)

    def needs_table(self, item: PlannedItem, chunk: SavedChunk | None) -> bool:
        """Return True if the table of block checksums must be read first: only part of the item is wanted.

        A whole item is verified by the one checksum in the metadata.
        """
        if chunk is None or item.target is None or not item.target.numel():
            return False
        return item.info.table_nbytes > 0 and tuple(item.read.lengths) != chunk.shape

    @staticmethod
    def _as_a_whole(info: ItemInfo) -> Whole | None:
        if info.block_crcs is not None or info.crc32c is None or info.payload_nbytes is None:
            return None
        return Whole(info.payload_nbytes, info.crc32c)

    # -- slices of a chunk --------------------------------------------------------------------------------------------

    def _split(
        self, item: PlannedItem, chunk: SavedChunk, offsets: tuple[int, ...], lengths: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Cut a slice into boxes, each of which is fetched as one range.

        A box is a single run that can be received in place, or a band of short runs that fits a leased buffer.
        """
        runs = self._runs(chunk, offsets, lengths)
        # A box is never smaller than a block: the whole block is fetched to verify any part of it, and once more for
        # each band that it is cut into.
        small = runs.span <= max(self._options.lease_bytes, item.info.block_nbytes or 0)
        if (runs.count == 1 and self._direct_ok(item, chunk)) or (small and self._affordable(item, runs)):
            yield offsets, lengths
            return
        axis = self._outermost(chunk, lengths)
        if axis is None:
            yield offsets, lengths
            return
        step = self._band(item, chunk, axis, lengths, runs)
        at, end = offsets[axis], offsets[axis] + lengths[axis]
        while at < end:
            # Bands end where blocks do, so that a block at a border is not fetched and checked twice.
            size = min(step - at % step, end - at)
            box = (*offsets[:axis], at, *offsets[axis + 1 :]), (*lengths[:axis], size, *lengths[axis + 1 :])
            yield from self._split(item, chunk, *box)
            at += size

    def _band(self, item: PlannedItem, chunk: SavedChunk, axis: int, lengths: tuple[int, ...], runs: Runs) -> int:
        """Return the number of indices of `axis` in one band: always fewer than there are, so that splitting ends."""
        if not self._affordable(item, runs):
            return 1
        row = chunk.strides[axis] * chunk.dtype.itemsize
        step = max(self._options.lease_bytes // max(row, 1), 1)
        block = item.info.block_nbytes or 0
        rows = block // row if block and row and block % row == 0 else 1
        return min(max(step - step % rows, rows), lengths[axis] - 1)

    def _affordable(self, item: PlannedItem, runs: Runs) -> bool:
        """Return True if reading across the gaps of a strided slice is cheaper than requesting each run."""
        # Gaps within a block are read in any case, as a block is verified as a whole.
        if runs.coalesced(max(self._options.free_gap_bytes, item.info.block_nbytes or 0)).count == 1:
            return True
        near = runs.coalesced(self._options.coalesce_gap_bytes).count == 1
        return near and runs.span <= self._options.max_overread * runs.nbytes

    def _piece(
        self,
        item: PlannedItem,
        chunk: SavedChunk,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        done: Callable[[], None],
    ) -> Iterator[Extent]:
        assert item.target is not None
        target = item.target
        for axis, (at, origin, size) in enumerate(zip(offsets, item.read.storage_offsets, lengths, strict=True)):
            if size != target.shape[axis]:
                target = target.narrow(axis, at - origin, size)
        runs = self._runs(chunk, offsets, lengths)
        if runs.count == 1 and self._direct_ok(item, chunk) and is_viewable(target):
            yield from self._direct(item, chunk, runs, target, done)
            return
        low, high, blocks = self._verified(item.info, runs.start, runs.start + runs.span)

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            source = tensor_over(view[runs.start - low :], runs.span, chunk, lengths)
            target.copy_(source)
            done()

        yield self._extent(item, chunk, low, high, blocks, deliver)

    def _direct(
        self, item: PlannedItem, chunk: SavedChunk, runs: Runs, target: torch.Tensor, done: Callable[[], None]
    ) -> Iterator[Extent]:
        """Return the extents of one run that is received in the target's contiguous memory.

        The run is cut into parts of `part_bytes`, at the borders of blocks.
        """
        memory = tensor_bytes(target)
        block = item.info.block_nbytes or 1
        size = max(self._options.part_bytes // block, 1) * block
        cuts = [runs.start, *range(runs.start - runs.start % block + size, runs.start + runs.nbytes, size)]
        cuts.append(runs.start + runs.nbytes)
        arrived = self._countdown(len(cuts) - 1, done)

        def deliver(_: memoryview | None, keep: torch.Tensor = target) -> None:
            arrived()

        for start, stop in itertools.pairwise(cuts):
            low, high, blocks = self._verified(item.info, start, stop)
            yield self._extent(
                item,
                chunk,
                low,
                high,
                blocks,
                deliver,
                direct=memory[start - runs.start : stop - runs.start],
                direct_start=chunk.payload_start + start,
            )

    def _extent(
        self,
        item: PlannedItem,
        chunk: SavedChunk,
        low: int,
        high: int,
        blocks: Sequence[Block],
        deliver: Deliver,
        direct: memoryview | None = None,
        direct_start: int = 0,
    ) -> Extent:
        return Extent(
            key=item.key,
            start=chunk.payload_start + low,
            stop=chunk.payload_start + high,
            deliver=deliver,
            blocks=blocks,
            direct=direct,
            direct_start=direct_start,
            label=item.read.storage_index.fqn,
            etag=self.etag_of(item),
        )

    def etag_of(self, item: PlannedItem) -> str | None:
        """Return the ETag that the object of an item must have; None if it is not known."""
        return self._etags.get(item.info.path)

    @staticmethod
    def _verified(info: ItemInfo, start: int, stop: int) -> tuple[int, int, list[Block]]:
        """Widen payload bytes `[start, stop)` to whole blocks, and return the checksum of each block too.

        Without block checksums the range stays as it is.
        """
        block = info.block_nbytes
        if not block or info.payload_nbytes is None or info.block_crcs is None:
            return start, stop, []
        first, last = start // block, -(-stop // block)
        low, high = first * block, min(last * block, info.payload_nbytes)
        blocks = [
            Block(min(block, info.payload_nbytes - index * block), info.block_crcs[index])
            for index in range(first, last)
        ]
        return low, high, blocks

    @staticmethod
    def _direct_ok(item: PlannedItem, chunk: SavedChunk) -> bool:
        target = item.target
        return target is not None and target.dtype == chunk.dtype and chunk.in_c_order and is_viewable(target)

    @staticmethod
    def _runs(chunk: SavedChunk, offsets: Sequence[int], lengths: Sequence[int]) -> Runs:
        return slice_runs(
            chunk.shape,
            offsets,
            lengths,
            chunk.dtype.itemsize,
            strides=chunk.strides,
            storage_offset=chunk.storage_offset,
        )

    @staticmethod
    def _outermost(chunk: SavedChunk, lengths: Sequence[int]) -> int | None:
        axes = [axis for axis, size in enumerate(lengths) if size > 1]
        return max(axes, key=lambda axis: chunk.strides[axis], default=None)

    # -- whole items --------------------------------------------------------------------------------------------------

    def _whole(self, item: PlannedItem) -> Extent:
        info = item.info
        blocks = []
        if info.crc32c is not None and info.payload_offset is None:
            blocks = [Block(info.length, info.crc32c)]

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            fqn = item.read.storage_index.fqn
            if item.target is None:
                data = load_bytes(view, info, self._transforms, key=fqn, trusted=self._trusted, planner=self._planner)
                with self._lock:
                    self._planner.load_bytes(item.read, io.BytesIO(data))
                return
            nbytes = self._saved_nbytes(item)
            saved = decode_item(view, info, self._transforms, key=fqn, tensor_nbytes=nbytes, trusted=self._trusted)
            for axis, (at, size) in enumerate(zip(item.read.storage_offsets, item.read.lengths, strict=True)):
                if (at, size) != (0, saved.shape[axis]):
                    saved = saved.narrow(axis, at, size)
            fill_tensor(item.target, saved)
            self._commit(item)

        return Extent(
            key=item.key,
            start=info.offset,
            stop=info.offset + info.length,
            deliver=deliver,
            blocks=blocks,
            label=item.read.storage_index.fqn,
            etag=self.etag_of(item),
        )

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _when_all(self, item: PlannedItem, pieces: int) -> Callable[[], None]:
        return self._countdown(pieces, lambda: self._commit(item))

    def _countdown(self, count: int, then: Callable[[], None]) -> Callable[[], None]:
        left = count
        lock = threading.Lock()

        def one() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                then()

        return one

    def _commit(self, item: PlannedItem) -> None:
        assert item.target is not None
        with self._lock:
            self._planner.commit_tensor(item.read, item.target)

    def _saved_nbytes(self, item: PlannedItem) -> int | None:
        """Return the bytes of an item's saved chunk by its shape and dtype, at most those of the whole tensor."""
        entry = self._metadata.state_dict_metadata.get(item.read.storage_index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        shape = self._shapes.of(item.read.storage_index)
        most = math.prod(entry.size)
        return min(most, most if shape is None else math.prod(shape)) * entry.properties.dtype.itemsize
