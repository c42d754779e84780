"""Metadata for a folder of safetensors in Hugging Face's layout, as a save of the same tensors would have.

The metadata is made from the headers of the files, so that readers do not depend on the format of the files. The
module also makes the errors for files of other kinds (Git LFS pointers, web pages).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from torch import Size, bfloat16
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bucketpoint.checkpoint.quantization import Quantization, declared, may_be_quantized
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
                    dtype, shape = bfloat16, quantization.shape_of(entry)
                offsets, size = Size([0] * len(shape)), Size(shape)
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
