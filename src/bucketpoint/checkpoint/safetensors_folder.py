"""Metadata for a folder of safetensors in Hugging Face's layout, as a save of the same tensors would have.

The metadata is made from the headers of the files, so that readers do not depend on the format of the files. The
module also makes the errors for files of other kinds (Git LFS pointers, web pages), and describes quantized tensors:
weights in 8 or 4 bits with a scale for each block of elements, as config.json declares them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.errors import (
    AccessDeniedError,
    BucketpointError,
    CorruptDataError,
    MetadataError,
    ObjectNotFoundError,
    PreconditionFailedError,
    first_of,
)
from bucketpoint.format import keys
from bucketpoint.format.metadata.codec import encode_metadata
from bucketpoint.format.metadata.facts import FILES, MAX_METADATA_BYTES, QUANTIZATION, SAFETENSORS
from bucketpoint.format.safetensors_header import (
    LENGTH_BYTES,
    TensorEntry,
    decode_header,
    decode_json,
    header_nbytes,
)
from bucketpoint.format.storage_info import make_storage_info
from bucketpoint.stores import ObjectInfo, Store, pinned
from bucketpoint.stores.retry import READ_ATTEMPTS, retry_transient
from bucketpoint.transfer import TransferOptions
from bucketpoint.transfer.pieces import for_each

HEAD_BYTES = 64
"""Number of bytes at the start of a file from which `explain` recognises its kind."""

_NAMED_AT_MOST = 5

_DOWNLOAD = "Download the file itself"
_BEGINNINGS = (
    (b"version https://git-lfs.", "a Git LFS pointer", "Fetch the data: `git lfs pull` in the clone, or `hf download`"),
    (b"<", "a web or XML page, such as a login page", f"{_DOWNLOAD}; the server sent this page in its place"),
)


def explain(head: bytes, url: str, key: str, error: BucketpointError) -> BucketpointError:
    """Return an error that names the kind of an unexpected file, from its first bytes; `error` for other kinds."""
    for beginning, what, remedy in _BEGINNINGS:
        if head.lstrip().startswith(beginning):
            return MetadataError(f"The file is {what}, not its data", url=url, key=key, remedy=remedy)
    if not head:
        return MetadataError("The file is empty", url=url, key=key, remedy=f"{_DOWNLOAD} again")
    return error


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"

_HEAD_BYTES = 128 << 10
"""Bytes of the first request for a file. Most headers are smaller."""

_MEMORY_FACTOR = 4
"""A byte of JSON takes up to 64 bytes of memory, four times the estimate for a byte of `.metadata`."""

_AGAIN = "Index and files are not from one save: download all of them again, or save the model with its index again"

_File = tuple[ObjectInfo, list[tuple[TensorEntry, int]]]
"""The store's description of a file, and the file's tensors with their offsets."""


class SafetensorsFolder:
    """Reader of the index and the headers in a folder.

    Args:
        max_bytes: limit on the bytes of `.metadata`, as for `MetadataSource`.
        dequantize: describe quantized tensors, which config.json declares, as bfloat16 tensors without scales.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        url: str,
        attempts: int = READ_ATTEMPTS,
        max_bytes: int = MAX_METADATA_BYTES,
        *,
        dequantize: bool = False,
    ) -> None:
        self._store, self._prefix, self._url, self._attempts = store, prefix, url, attempts
        self._dequantize = dequantize
        self._most = self._left = max_bytes // _MEMORY_FACTOR
        self._lock = threading.Lock()

    def read(self, file: str | None = None) -> tuple[bytes, ObjectInfo]:
        """Return the metadata, encoded as `.metadata`, and the store's description of the index or the single file.

        Sends a GET for the index, one for each file (two if the header is long), and one for config.json if there may
        be tensors to dequantize. A load requires the ETags of the files.

        Args:
            file: name of the one file to read; by default the files that the index names, else `model.safetensors`.

        Raises:
            ObjectNotFoundError: neither the index nor the file exists.
            MetadataError: the index or a file is malformed, or the index does not fit the files.
            CorruptDataError: files that the index names are missing, or a file was replaced during the read.
            UnsafeDataError: the index names a file outside the folder.
        """
        named = info = None
        if file is None:
            # S3 answers 403 instead of 404 to callers that may not list.
            with contextlib.suppress(ObjectNotFoundError, AccessDeniedError):
                named, info = self._index()
        if named is None or info is None:
            file = file or SINGLE_NAME
            info, tensors = self._file(file)
            return self._metadata({file: (info, tensors)}), info
        files: dict[str, _File] = {}
        gone: set[str] = set()

        def read(name: str) -> None:
            try:
                files[name] = self._file(name)
            except (ObjectNotFoundError, AccessDeniedError):
                gone.add(name)

        for_each(dict.fromkeys(named.values()), read, TransferOptions())
        if gone:
            raise CorruptDataError(
                f"Files that the safetensors index names are missing: {first_of(sorted(gone), _NAMED_AT_MOST)}",
                url=self._url,
                key=min(gone),
                remedy="Put the missing files beside the index; an interrupted download leaves such a folder",
            )
        self._compare(named, files)
        return self._metadata(dict(sorted(files.items()))), info

    def _index(self) -> tuple[dict[str, str], ObjectInfo]:
        key = keys.join(self._prefix, INDEX_NAME)
        data, info = retry_transient(lambda: self._store.get(key, max_bytes=self._most), attempts=self._attempts)
        try:
            named = decode_json(data, key=key).get("weight_map")
        except MetadataError as error:
            raise explain(data, self._store.url, key, error) from None
        if type(named) is not dict or not named or not all(type(file) is str for file in named.values()):
            raise MetadataError("The index has no weight_map that names tensors", url=self._url, key=key, remedy=_AGAIN)
        return named, info

    def _file(self, name: str) -> _File:
        key = keys.join(self._prefix, name)
        head, info = retry_transient(lambda: self._store.get(key, first=_HEAD_BYTES), attempts=self._attempts)
        try:
            nbytes = header_nbytes(head[:LENGTH_BYTES], info.size, key=key)
        except MetadataError as error:
            raise explain(head, self._store.url, key, error) from None
        with self._lock:
            self._left -= nbytes
            enough = self._left >= 0
        if not enough:
            raise MetadataError(
                f"The headers of the files have more than {self._most} bytes",
                url=self._url,
                key=key,
                remedy="If the headers are right, raise TransferOptions(max_metadata_bytes=...) to 64 times their size",
            )
        first = LENGTH_BYTES + nbytes
        text = bytearray(nbytes)
        text[: len(head) - LENGTH_BYTES] = head[LENGTH_BYTES:first]
        if len(head) < first:
            rest = memoryview(text)[len(head) - LENGTH_BYTES :]
            etag = pinned(self._store, info.etag)
            try:
                retry_transient(
                    lambda: self._store.read_into(key, len(head), [rest], if_match=etag), attempts=self._attempts
                )
            except PreconditionFailedError as error:
                raise CorruptDataError(
                    f"The file was replaced while its header was read: {error.message}", url=self._url, key=key
                ) from error
        entries = decode_header(bytes(text), info.size - first, key=key)
        return info, [(entry, first + entry.start) for entry in entries]

    def _compare(self, named: Mapping[str, str], files: Mapping[str, _File]) -> None:
        held = {entry.name: file for file, (_, tensors) in files.items() for entry, _ in tensors}
        for tensor, file in named.items():
            if held.get(tensor) != file:
                raise MetadataError(
                    f"The index names {file} for a tensor that the file does not have",
                    url=self._url,
                    key=tensor[:200],
                    remedy=_AGAIN,
                )
        more = sorted(held.keys() - named.keys())
        if more or sum(len(tensors) for _, tensors in files.values()) != len(named):
            what = first_of([f"{tensor[:200]} of {held[tensor]}" for tensor in more], 5) or "one tensor in two files"
            raise MetadataError(
                f"The files hold tensors that the index does not name: {what}",
                url=self._url,
                key=keys.join(self._prefix, INDEX_NAME),
                remedy=_AGAIN,
            )

    def _quantization(self, files: Mapping[str, _File]) -> Quantization | None:
        entries = {entry.name: entry for _, tensors in files.values() for entry, _ in tensors}
        if not self._dequantize or not any(map(may_be_quantized, entries.values())):
            return None
        key = keys.join(self._prefix, CONFIG_NAME)
        try:
            data, _ = retry_transient(lambda: self._store.get(key, max_bytes=self._most), attempts=self._attempts)
        except (ObjectNotFoundError, AccessDeniedError):
            return None
        return declared(decode_json(data, key=key).get("quantization_config"), entries, key=key)

    def _metadata(self, files: Mapping[str, _File]) -> bytes:
        state: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        quantization = self._quantization(files)
        quantized = {} if quantization is None else quantization.scales
        hidden = set(quantized.values())
        for path, (_, tensors) in files.items():
            for entry, start in tensors:
                dtype, shape = entry.dtype, entry.shape
                if quantization is not None and entry.name in quantized:
                    dtype, shape = torch.bfloat16, quantization.shape_of(entry)
                offsets, size = torch.Size([0] * len(shape)), torch.Size(shape)
                if entry.name not in hidden:
                    chunks = [ChunkStorageMetadata(offsets, size)]
                    state[entry.name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
                stored[MetadataIndex(entry.name, offsets, 0)] = make_storage_info(
                    path, start, entry.nbytes, payload_offset=0, payload_nbytes=entry.nbytes
                )
        facts = {
            FILES: SAFETENSORS,
            "writer": None,
            "url": self._url,
            "endpoint": self._store.identity,
            "objects": {path: {"size": info.size, "etag": info.etag} for path, (info, _) in files.items()},
            QUANTIZATION: None if quantization is None else vars(quantization),
        }
        return encode_metadata(Metadata(state, {name: (name,) for name in state}, stored), bucketpoint=facts)


# -- quantized tensors -------------------------------------------------------------------------------------------------

FP8, MXFP4 = "fp8", "mxfp4"
"""Layouts: `fp8` of DeepSeek, float8_e4m3fn in blocks such as 128x128; `mxfp4` of GPT-OSS, 4-bit floats in groups of
32."""

_REMEDY = "Download config.json and the files again, or pass dequantize=False to the reader for what is stored"

_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"
_SCALE_DTYPES = {FP8: (torch.float32, torch.bfloat16), MXFP4: (torch.uint8, torch.float8_e8m0fnu)}
_GROUP_BYTES = 16
_MAX_BLOCK = 1 << 30


@dataclass(frozen=True)
class Quantization:
    """The quantized tensors of a folder.

    Attributes:
        block: sizes of a block in the last dimensions; in all other dimensions the size is 1.
        scales: names of the scales, by the name of their quantized tensor.
    """

    method: str
    block: Sequence[int]
    scales: Mapping[str, str]

    @classmethod
    def of(cls, fact: Any) -> Quantization:
        """Return the quantization in a fact of untrusted metadata. Raises MetadataError."""
        if type(fact) is dict and fact.keys() == {"method", "block", "scales"}:
            scales, known = fact["scales"], fact["method"] in (FP8, MXFP4)
            if known and _is_block(fact["block"]) and type(scales) is dict and {*map(type, scales.values())} <= {str}:
                return cls(**fact)
        raise MetadataError("The metadata has a malformed description of quantized tensors")

    def block_in(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a block in all dimensions of a tensor."""
        if len(shape) < len(self.block):
            raise MetadataError("The metadata has a quantized tensor with fewer dimensions than its blocks")
        return (1,) * (len(shape) - len(self.block)) + tuple(self.block)

    def shape_of(self, entry: TensorEntry) -> tuple[int, ...]:
        """Return the shape of a quantized tensor in elements."""
        return entry.shape if self.method == FP8 else (*entry.shape[:-2], 2 * math.prod(entry.shape[-2:]))

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of `shape`, which is in elements."""
        return tuple(-(-size // step) for size, step in zip(shape, self.block_in(shape), strict=True))

    def scales_dtype(self, itemsize: int) -> torch.dtype:
        """Return the dtype of the scales from the size of one scale. Scales of `mxfp4` are exponents of 2."""
        if self.method == MXFP4:
            return torch.float8_e8m0fnu
        return torch.bfloat16 if itemsize == torch.bfloat16.itemsize else torch.float32


def may_be_quantized(entry: TensorEntry) -> bool:
    """Return True if config.json may declare the tensor as quantized, or as scales."""
    return _is_fp8(entry) or entry.name.endswith(_SCALE_INV) or _is_fp4(entry)


def declared(config: Any, entries: Mapping[str, TensorEntry], *, key: str) -> Quantization | None:
    """Return the tensors that `quantization_config` declares as quantized; None for an unknown method.

    Raises:
        MetadataError: a tensor has no scales, or scales of a wrong shape or dtype.
    """
    config = config if type(config) is dict else {}
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method == FP8 and block is not None:
        if not _is_block(block) or len(block) != 2:
            text = f"weight_block_size in config.json is no pair of sizes: {str(block)[:50]}"
            raise MetadataError(text, key=key, remedy=_REMEDY)
        scales = {name: name + _SCALE_INV for name in entries}
        # A tensor with scales must be FP8. Other dtypes are refused below.
        names = {name: scales[name] for name, entry in entries.items() if _is_fp8(entry) or scales[name] in entries}
    elif method == MXFP4:
        block = [2 * _GROUP_BYTES]
        names = {name: name.removesuffix(_BLOCKS) + _SCALES for name, entry in entries.items() if _is_fp4(entry)}
    else:
        return None
    quantization = Quantization(method, block, names)
    for name, own in names.items():
        if fault := _fault(quantization, entries[name], own, entries.get(own)):
            raise MetadataError(f"config.json declares {method}, but {fault}", key=name[:200], remedy=_REMEDY)
    return quantization


def _fault(quantization: Quantization, entry: TensorEntry, name: str, scales: TensorEntry | None) -> str | None:
    fp8, dtypes = quantization.method == FP8, _SCALE_DTYPES[quantization.method]
    if scales is None:
        return f"the files lack the scales {name[:200]}"
    if fp8 and not _is_fp8(entry):
        return f"this tensor with scales is {entry.dtype}"
    if len(entry.shape) < 2 or not (fp8 or entry.shape[-1] == _GROUP_BYTES):
        return f"this tensor has the shape {list(entry.shape)}"
    shape = quantization.scales_shape(quantization.shape_of(entry))
    if scales.shape != shape:
        return f"the scales {name[:200]} have the shape {list(scales.shape)} instead of {list(shape)}"
    return None if scales.dtype in dtypes else f"the scales {name[:200]} are {scales.dtype} instead of {dtypes[0]}"


def _is_fp8(entry: TensorEntry) -> bool:
    return entry.dtype is torch.float8_e4m3fn


def _is_fp4(entry: TensorEntry) -> bool:
    return entry.dtype is torch.uint8 and entry.name.endswith(_BLOCKS)


def _is_block(block: Any) -> bool:
    return type(block) is list and len(block) > 0 and all(type(size) is int and 0 < size < _MAX_BLOCK for size in block)
