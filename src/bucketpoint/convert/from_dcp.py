"""Reader of a folder of safetensors, or of a DCP checkpoint of bucketpoint, torch's writers or s3torchconnector.

Frames of other writers are parsed with a few small reads each, so that their elements can be streamed.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.checkpoint.open import SavedCheckpoint, damaged, look_at_objects
from bucketpoint.convert.from_torch import Skeleton, open_archive
from bucketpoint.convert.source import (
    BLOCK_BYTES,
    BUCKETPOINT,
    DCP,
    SAFETENSORS,
    SAFETENSORS_SUFFIX,
    Checksum,
    Decoded,
    Held,
    Payload,
    Source,
    SourceBytes,
    Stretch,
    exclude_option,
    excluded_keys,
    without,
)
from bucketpoint.dcp.loading.decode import decode_item, without_transforms
from bucketpoint.dcp.planning.nested_state import noted_int_keys
from bucketpoint.errors import MetadataError, UnsafeDataError
from bucketpoint.format.item_info import ItemInfo
from bucketpoint.format.pickles.items import check_archive, read_item
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError
from bucketpoint.transfer import BufferPool
from bucketpoint.transfer.checksum import crc32c
from bucketpoint.transfer.pieces import for_each


def read_dcp(
    source: SourceBytes,
    saved: SavedCheckpoint,
    *,
    prefix: str = "",
    exclude: str | Iterable[str] = (),
    trusted: bool = False,
) -> Source:
    """Plan the reading of a checkpoint. Items other than tensors are read, and checked against the allow-list.

    Args:
        prefix: put before each key if the checkpoint is a folder of safetensors.

    Raises:
        UnsafeDataError: an item names something outside the allow-list.
        CorruptDataError: an object is missing, too short, or was replaced since the commit.
        MetadataError: an item has no data, or differs from its description in the metadata.
    """
    look_at_objects(saved, source.look, source.options)
    excluded = excluded_keys(exclude, saved.metadata.state_dict_metadata, url=saved.url)
    saved = dataclasses.replace(saved, metadata=without(saved.metadata, excluded))
    reading = _Reading(source, saved, trusted)
    payloads: dict[MetadataIndex, Payload] = {}

    def read(item: tuple[MetadataIndex, ItemInfo]) -> None:
        payloads[item[0]] = reading.payload(*item)

    for_each(saved.items, read, source.options)
    _check_complete(saved, payloads)
    record = saved.record
    # `replace` drops bucketpoint's attributes, which describe the source's objects.
    metadata = dataclasses.replace(saved.metadata, storage_data=None, storage_meta=None)
    if saved.is_safetensors and prefix:
        state = {prefix + fqn: entry for fqn, entry in metadata.state_dict_metadata.items()}
        metadata = dataclasses.replace(metadata, state_dict_metadata=state, planner_data={key: (key,) for key in state})
        payloads = {dataclasses.replace(index, fqn=prefix + index.fqn): payload for index, payload in payloads.items()}
    return Source(
        SAFETENSORS if saved.is_safetensors else BUCKETPOINT if saved.facts else DCP,
        saved.url,
        source,
        metadata,
        dict(sorted(payloads.items(), key=lambda item: (item[0].fqn, tuple(item[0].offset or ())))),
        source.fingerprint(saved.data),
        record.kind,
        record.metrics,
        excluded,
        None if saved.url.endswith(SAFETENSORS_SUFFIX) else saved.prefix,
        noted_int_keys(saved.metadata, url=saved.url),
    )


def _check_complete(saved: SavedCheckpoint, payloads: dict[MetadataIndex, Payload]) -> None:
    for fqn, entry in saved.metadata.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        if any(MetadataIndex(fqn, offset) not in payloads for offset in offsets):
            raise MetadataError("The metadata names no data for this item", url=saved.url, key=fqn)


class _Reading:
    """State that is shared by the threads that inspect the items."""

    def __init__(self, source: SourceBytes, saved: SavedCheckpoint, trusted: bool) -> None:
        self._source = source
        self._saved = saved
        self._trusted = trusted
        self._transforms = ExtensionRegistry()
        self._pool = BufferPool(source.options.max_inflight_bytes // 2)

    def payload(self, index: MetadataIndex, info: ItemInfo) -> Payload:
        key = self._saved.key(info.path)
        entry = self._saved.metadata.state_dict_metadata.get(index.fqn)
        if entry is None:
            raise MetadataError(
                "The metadata names data of an item that is not in its state dict", url=self._saved.url, key=index.fqn
            )
        if not isinstance(entry, TensorStorageMetadata):
            return self._bytes(key, index.fqn, info)
        shape = self._saved.shapes.of(index)
        if shape is None:
            raise MetadataError("The item is not a chunk of its tensor", url=self._saved.url, key=index.fqn)
        dtype, stop = entry.properties.dtype, info.offset + info.length
        nbytes = math.prod(shape) * dtype.itemsize
        if info.payload_offset is not None and not info.transform_descriptors:
            if info.payload_nbytes != nbytes:
                raise self._unlike(index.fqn)
            start = info.offset + info.payload_offset
            return Stretch(key, start, nbytes, _crc32c(info))
        if not info.transform_descriptors:
            framed = self._framed(key, index.fqn, info, dtype, shape)
            if framed is None and info.crc32c is None:
                self._check_archive(info, io.BufferedReader(self._source.file(key, info.offset, stop), BLOCK_BYTES))
            return framed or Stretch(key, info.offset, info.length, _crc32c(info), opaque=True)
        return Decoded(nbytes, lambda: self._decoded(key, index.fqn, info, dtype, shape), (key, info.offset))

    def _framed(
        self, key: str, fqn: str, info: ItemInfo, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Stretch | Decoded | None:
        archive = open_archive(self._source, key, info.offset, info.offset + info.length)
        try:
            skeleton = None if archive is None else Skeleton(archive, trusted=self._trusted)
        except MetadataError:
            # Some kinds of tensors cannot be rebuilt without their elements.
            skeleton = None
        tensor: Any = None if skeleton is None else skeleton.root
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if skeleton is None or not plain or tensor.is_quantized:
            # Check all bytes, which are passed on unchanged: another reader may find other records in the archive.
            with self._pool.lease(info.length) as raw:
                self._source.read(key, info.offset, raw)
                self._judge(fqn, raw)
            return None
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise self._unlike(fqn)
        return skeleton.payload(tensor, fqn)

    def _decoded(self, key: str, fqn: str, info: ItemInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        raw = self._source.take(key, info.offset, info.length)
        self._check(key, info, raw)
        nbytes = math.prod(shape) * dtype.itemsize
        tensor = decode_item(raw, info, self._transforms, key=fqn, tensor_nbytes=nbytes, trusted=self._trusted)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise self._unlike(fqn)
        return tensor

    def _bytes(self, key: str, fqn: str, info: ItemInfo) -> Payload:
        with self._pool.lease(info.length) as raw:
            self._source.read(key, info.offset, raw)
            self._check(key, info, raw)
            if not info.transform_descriptors:
                self._judge(fqn, raw)
                if info.crc32c is None:
                    self._check_archive(info, io.BytesIO(raw))
                return Stretch(key, info.offset, info.length, _crc32c(info))
            data = bytes(without_transforms(raw, info, self._transforms, key=fqn, trusted=self._trusted))
            self._judge(fqn, data)
            return Held(data)

    def _judge(self, fqn: str, data: bytes | memoryview) -> None:
        """Check an item against the allow-list.

        The conversion does not unpickle the item, but readers of the result will trust it as they trust the writer.
        """
        if self._trusted:
            return
        try:
            read_item(bytes(data))
        except (RefusedError, UnreadableError) as error:
            named = f"names {error}" if isinstance(error, RefusedError) else "is not in the format of torch.save"
            raise UnsafeDataError(
                f"The item {named}",
                url=self._saved.url,
                key=fqn,
                remedy=f"Leave it out with {exclude_option(fqn)}, or pass --trusted if you trust the writer",
            ) from None

    def _check(self, key: str, info: ItemInfo, raw: memoryview) -> None:
        if info.crc32c is not None and info.payload_offset is None and crc32c(raw) != info.crc32c:
            raise damaged(
                self._saved, info.path, f"the item at byte {info.offset} has a different checksum than at save"
            )

    def _check_archive(self, info: ItemInfo, file: BinaryIO) -> None:
        """Check an archive that is passed on unchanged and has no checksum except those inside it."""
        if reason := check_archive(file):
            raise damaged(self._saved, info.path, f"the archive at byte {info.offset} is damaged: {reason}")

    def _unlike(self, fqn: str) -> MetadataError:
        return MetadataError("The item has another dtype or shape than its metadata", url=self._saved.url, key=fqn)


def _crc32c(info: ItemInfo) -> Checksum | None:
    return None if info.crc32c is None else Checksum("crc32c", info.crc32c)
