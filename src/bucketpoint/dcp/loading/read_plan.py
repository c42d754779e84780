"""Translation of DCP's read items to extents: byte ranges of objects, their targets, and the checksums to verify."""

from __future__ import annotations

import io
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import LoadPlanner, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from bucketpoint.dcp.loading.decode import Fp4Chunk, SavedChunk, decode_item, fill_tensor, load_bytes, multiply
from bucketpoint.errors import MetadataError, MismatchError
from bucketpoint.format import keys
from bucketpoint.format.index.view import ChunkShapes
from bucketpoint.format.item_info import ItemInfo, read_item
from bucketpoint.format.tensor_bytes import Box, Runs, blocks_of, is_viewable, refuse_freed, tensor_bytes
from bucketpoint.transfer import Block, Extent, TransferOptions, Whole

if TYPE_CHECKING:
    from bucketpoint.checkpoint.safetensors_folder import Quantization


@dataclass(frozen=True)
class PlannedItem:
    """A read item with its metadata.

    Attributes:
        target: the tensor into which the item is read; None for bytes.
        etag: the ETag that the object must have; None if unknown.
        chunk: the saved chunk of which a slice is read; None if the item is read whole.
        shared: the target overlaps that of another item. Both items are received in other memory, because one could
            overwrite the other before its checksum is compared.
        scales: the item with the scales of quantized elements; it has no target.
    """

    read: ReadItem
    info: ItemInfo
    key: str
    target: torch.Tensor | None
    etag: str | None
    chunk: SavedChunk | None
    shared: bool = False
    scales: PlannedItem | None = None

    @property
    def fqn(self) -> str:
        return self.read.storage_index.fqn

    @property
    def place(self) -> tuple[str, int]:
        """The object of the saved item, and its offset there."""
        return self.key, self.info.offset

    def target_of(self, box: Box) -> torch.Tensor:
        """Return the part of the target that receives a box of the chunk."""
        assert self.target is not None
        target = self.target
        for axis, (at, origin, size) in enumerate(zip(box[0], self.read.storage_offsets, box[1], strict=True)):
            if size != target.shape[axis]:
                target = target.narrow(axis, at - origin, size)
        return target

    def needs_table(self, *, alone: bool = False) -> bool:
        """Return True if the table of block checksums must be read first, because only a part of the item is read.

        A whole item is verified by the checksum in the metadata, unless each range must be verified `alone`.
        """
        if self.chunk is None or self.target is None or not self.target.numel():
            return False
        return self.info.table_nbytes > 0 and (alone or tuple(self.read.lengths) != self.chunk.shape)


@dataclass(frozen=True)
class ReadPlan:
    """Translator of one rank's items to extents; it commits each item to the planner once the item has arrived.

    Only one thread at a time calls the planner, because planners are not thread-safe.
    """

    metadata: Metadata
    planner: LoadPlanner
    prefix: str
    etags: dict[str, str]
    options: TransferOptions
    transforms: Any
    trusted: bool
    shapes: ChunkShapes
    quantization: Quantization | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def resolve(self, items: Sequence[ReadItem]) -> list[PlannedItem]:
        """Find every item in the metadata, and the tensor to load it into.

        Raises:
            MetadataError: the metadata names no data for an item.
            MismatchError: the planner passed a tensor of another size than requested, or one that cannot hold the
                values of a quantized tensor.
        """
        quantized = {} if self.quantization is None else self.quantization.scales
        resolved = []
        for item in items:
            target = None
            if item.type != LoadItemType.BYTE_IO:
                target = self.planner.resolve_tensor(item)
                # Sparse elements and a quantiser can be replaced only on the tensor itself, not on an alias.
                plain = target.layout is torch.strided and not target.is_quantized
                target = target.detach() if plain else target
                if tuple(target.shape) != tuple(item.lengths):
                    raise MismatchError(
                        f"The planner requested {list(item.lengths)} but passed a tensor of shape {list(target.shape)}",
                        key=item.dest_index.fqn,
                    )
                refuse_freed(target, item.dest_index.fqn)
            if item.storage_index.fqn in quantized:
                resolved.append(self._quantized(item, target))
            else:
                info, key, etag = self._found(item.storage_index)
                resolved.append(PlannedItem(item, info, key, target, etag, self._chunk_of(item, info)))
        return resolved

    def _found(self, index: MetadataIndex) -> tuple[ItemInfo, str, str | None]:
        """Return the facts of an item, the key of its object, and the ETag of the object."""
        stored = (self.metadata.storage_data or {}).get(index)
        if stored is None:
            raise MetadataError("The metadata names no data for this item", key=index.fqn)
        info = read_item(stored)
        return info, keys.join(self.prefix, info.path), self.etags.get(info.path)

    def _quantized(self, read: ReadItem, target: torch.Tensor | None) -> PlannedItem:
        from bucketpoint.checkpoint.safetensors_folder import FP8

        quantization, shape = self.quantization, self.shapes.of(read.storage_index) or ()
        assert quantization is not None
        kind, stored = (SavedChunk, torch.float8_e4m3fn) if quantization.method == FP8 else (Fp4Chunk, torch.uint8)
        info, key, etag = self._found(read.storage_index)
        item = PlannedItem(read, info, key, target, etag, kind.of(info, dtype=stored, shape=shape))
        dtype = None if target is None else target.dtype
        if dtype is None or not dtype.is_floating_point or dtype.itemsize < torch.bfloat16.itemsize:
            raise MismatchError(
                f"The tensor is quantized, and its values do not fit into {dtype}",
                key=item.fqn,
                remedy="Load into bfloat16 or float32, or pass dequantize=False to the reader for what is stored",
            )
        count = quantization.scales_shape(shape)
        info, key, etag = self._found(MetadataIndex(quantization.scales[item.fqn], torch.Size([0] * len(count))))
        itemsize = info.checked_nbytes // max(math.prod(count), 1)
        chunk = SavedChunk.of(info, quantization.scales_dtype(itemsize), count)
        scales = PlannedItem(read, info, key, None, etag, chunk)
        if item.chunk is None or scales.chunk is None:
            raise MetadataError("A quantized tensor or its scales have other sizes in the metadata", key=item.fqn)
        return replace(item, scales=scales)

    def _tensor(self, item: ReadItem) -> TensorStorageMetadata | None:
        entry = self.metadata.state_dict_metadata.get(item.storage_index.fqn)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def _chunk_of(self, item: ReadItem, info: ItemInfo) -> SavedChunk | None:
        """Return the saved chunk of the item; None if the metadata does not locate its raw elements."""
        entry, shape = self._tensor(item), self.shapes.of(item.storage_index)
        return None if entry is None or shape is None else SavedChunk.of(info, entry.properties.dtype, shape)

    def needs_probe(self, item: PlannedItem) -> bool:
        """Return True for another writer's frame that is read in part, or is too large to read whole."""
        info = item.info
        ours = info.payload_offset is not None or info.crc32c is not None
        if item.target is None or ours or info.transform_descriptors:
            return False
        entry = self._tensor(item.read)
        wanted = 0 if entry is None else item.target.numel() * entry.properties.dtype.itemsize
        return info.length > self.options.lease_bytes or wanted * 2 < info.length

    def extents(self, item: PlannedItem) -> Iterator[Extent]:
        chunk, info, read = item.chunk, item.info, item.read
        if chunk is None:
            yield self._whole(item)
            return
        assert item.target is not None
        if item.target.numel() == 0:
            self._commit(item)
            return
        offsets, lengths = tuple(read.storage_offsets), tuple(read.lengths)
        if any(o < 0 or n < 0 or o + n > size for o, n, size in zip(offsets, lengths, chunk.shape, strict=True)):
            raise MismatchError(
                f"The planner requested {list(lengths)} at {list(offsets)} of a chunk of shape {list(chunk.shape)}",
                key=item.fqn,
            )
        boxes = list(self._split(item, chunk, (offsets, lengths)))
        done = _countdown(len(boxes), lambda: self._commit(item))
        whole = None
        if info.block_crcs is None and info.crc32c is not None and info.payload_nbytes is not None:
            whole = Whole(info.payload_nbytes, info.crc32c)
        read_box = self._slice if item.scales is None else self._scaled
        for box in boxes:
            for extent in read_box(item, chunk, box, done):
                yield extent if whole is None else replace(extent, part_of=whole)

    # -- slices of a chunk --------------------------------------------------------------------------------------------

    def _split(self, item: PlannedItem, chunk: SavedChunk, box: Box) -> Iterator[Box]:
        """Cut a slice into boxes, each of which is fetched as one range.

        A box is a single run that can be received in place, or a band of short runs that fits a leased buffer.
        """
        offsets, lengths = box
        runs = chunk.runs(offsets, lengths)
        # A box that spans at most a block is not cut: each band would fetch the whole block again, to verify its part.
        small = runs.span <= max(self.options.lease_bytes, item.info.block_nbytes or 0)
        axes = [axis for axis, size in enumerate(lengths) if size > 1]
        fits = (runs.count == 1 and _fits_in_place(item, chunk)) or (small and self._affordable(item, runs))
        if fits or not axes:
            yield box
            return
        axis = max(axes, key=lambda axis: chunk.strides[axis])
        step = self._band(item, chunk, axis, lengths, runs)
        at, end = offsets[axis], offsets[axis] + lengths[axis]
        while at < end:
            # Bands end where blocks do, so that a block at a border is not fetched and checked twice.
            size = min(step - at % step, end - at)
            band = (*offsets[:axis], at, *offsets[axis + 1 :]), (*lengths[:axis], size, *lengths[axis + 1 :])
            yield from self._split(item, chunk, band)
            at += size

    def _band(self, item: PlannedItem, chunk: SavedChunk, axis: int, lengths: tuple[int, ...], runs: Runs) -> int:
        """Return the number of indices of `axis` in one band: fewer than the axis has, so that the recursion ends."""
        if not self._affordable(item, runs):
            return 1
        row = chunk.strides[axis] * chunk.dtype.itemsize
        step = max(self.options.lease_bytes // max(row, 1), 1)
        block = item.info.block_nbytes or 0
        rows = block // row if block and row and block % row == 0 else 1
        return min(max(step - step % rows, rows), lengths[axis] - 1)

    def _affordable(self, item: PlannedItem, runs: Runs) -> bool:
        """Return True if reading across the gaps of a strided slice is cheaper than requesting each run."""
        # Gaps within a block are read in any case, as a block is verified as a whole.
        if runs.coalesced(max(self.options.free_gap_bytes, item.info.block_nbytes or 0)).count == 1:
            return True
        near = runs.coalesced(self.options.coalesce_gap_bytes).count == 1
        return near and runs.span <= self.options.max_overread * runs.nbytes

    def _slice(self, item: PlannedItem, chunk: SavedChunk, box: Box, done: Callable[[], None]) -> Iterator[Extent]:
        target, runs = item.target_of(box), chunk.runs(*box)
        if runs.count == 1 and _fits_in_place(item, chunk) and is_viewable(target):
            yield from self._direct(item, chunk, runs, target, done)
            return
        low, high, blocks = _verified(item.info, runs.start, runs.start + runs.span)

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            chunk.fill(target, torch.frombuffer(view[runs.start - low :], dtype=torch.uint8, count=runs.span), box)
            done()

        origin = chunk.payload_start
        yield Extent(item.key, origin + low, origin + high, deliver, blocks, label=item.fqn, etag=item.etag)

    def _scaled(self, item: PlannedItem, chunk: SavedChunk, box: Box, done: Callable[[], None]) -> Iterator[Extent]:
        """Return the extents of a box of quantized elements and of its scales.

        The target receives the elements as they are stored, and is multiplied once the scales have arrived too.
        """
        scales = item.scales
        assert self.quantization is not None
        assert scales is not None
        assert scales.chunk is not None
        block, saved = self.quantization.block_in(chunk.shape), scales.chunk
        scales_box = blocks_of(box, block)
        runs = saved.runs(*scales_box)
        # The list is emptied after use, because the extents are kept until the end of the load.
        held: list[torch.Tensor] = []

        def both_arrived() -> None:
            multiply(item.target_of(box), held.pop(), box[0], block)
            done()

        arrived = _countdown(2, both_arrived)

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            factors = torch.empty(scales_box[1], dtype=saved.dtype, device="cpu")
            saved.fill(factors, torch.frombuffer(view, dtype=torch.uint8, count=runs.span), scales_box)
            held.append(factors)
            arrived()

        start = saved.payload_start + runs.start
        yield from self._slice(item, chunk, box, arrived)
        yield Extent(scales.key, start, start + runs.span, deliver, label=item.fqn, etag=scales.etag)

    def _direct(
        self, item: PlannedItem, chunk: SavedChunk, runs: Runs, target: torch.Tensor, done: Callable[[], None]
    ) -> Iterator[Extent]:
        """Return the extents of one run that is received in the target's contiguous memory.

        The run is cut into parts of `part_bytes`, at the borders of blocks.
        """
        memory, origin = tensor_bytes(target), chunk.payload_start
        block = item.info.block_nbytes or 1
        size = max(self.options.part_bytes // block, 1) * block
        cuts = [runs.start, *range(runs.start - runs.start % block + size, runs.start + runs.nbytes, size)]
        cuts.append(runs.start + runs.nbytes)
        arrived = _countdown(len(cuts) - 1, done)

        def deliver(_: memoryview | None, keep: torch.Tensor = target) -> None:
            arrived()

        for start, stop in itertools.pairwise(cuts):
            low, high, blocks = _verified(item.info, start, stop)
            direct = memory[start - runs.start : stop - runs.start]
            yield Extent(
                item.key, origin + low, origin + high, deliver, blocks, direct, origin + start, item.fqn, item.etag
            )

    # -- whole items --------------------------------------------------------------------------------------------------

    def _whole(self, item: PlannedItem) -> Extent:
        info = item.info
        blocks = []
        if info.crc32c is not None and info.payload_offset is None:
            blocks = [Block(info.length, info.crc32c)]

        def deliver(view: memoryview | None) -> None:
            assert view is not None
            if item.target is None:
                data = load_bytes(view, info, self.transforms, key=item.fqn, trusted=self.trusted, planner=self.planner)
                with self.lock:
                    self.planner.load_bytes(item.read, io.BytesIO(data))
                return
            nbytes = self._saved_nbytes(item)
            saved = decode_item(view, info, self.transforms, key=item.fqn, tensor_nbytes=nbytes, trusted=self.trusted)
            for axis, (at, size) in enumerate(zip(item.read.storage_offsets, item.read.lengths, strict=True)):
                if (at, size) != (0, saved.shape[axis]):
                    saved = saved.narrow(axis, at, size)
            fill_tensor(item.target, saved)
            self._commit(item)

        return Extent(item.key, info.offset, info.offset + info.length, deliver, blocks, label=item.fqn, etag=item.etag)

    def _commit(self, item: PlannedItem) -> None:
        assert item.target is not None
        with self.lock:
            self.planner.commit_tensor(item.read, item.target)

    def _saved_nbytes(self, item: PlannedItem) -> int | None:
        """Return the bytes of an item's saved chunk by its shape and dtype, at most those of the whole tensor."""
        entry = self._tensor(item.read)
        if entry is None:
            return None
        shape = self.shapes.of(item.read.storage_index)
        most = math.prod(entry.size)
        return min(most, most if shape is None else math.prod(shape)) * entry.properties.dtype.itemsize


def _fits_in_place(item: PlannedItem, chunk: SavedChunk) -> bool:
    target = item.target
    if target is None or item.shared:
        return False
    return target.dtype == chunk.dtype and chunk.in_c_order and is_viewable(target)


def _verified(info: ItemInfo, start: int, stop: int) -> tuple[int, int, list[Block]]:
    """Widen payload bytes `[start, stop)` to whole blocks, and return the new range and the checksums of the blocks.

    Without block checksums the range stays as it is.
    """
    block, nbytes = info.block_nbytes, info.payload_nbytes
    if not block or nbytes is None or info.block_crcs is None:
        return start, stop, []
    first, last = start // block, -(-stop // block)
    blocks = [Block(min(block, nbytes - index * block), info.block_crcs[index]) for index in range(first, last)]
    return first * block, min(last * block, nbytes), blocks


def _countdown(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `then` when it is called for the `count`-th time."""
    numbers = itertools.count(1)

    def arrived() -> None:
        # One step of the iterator is atomic.
        if next(numbers) == count:
            then()

    return arrived
