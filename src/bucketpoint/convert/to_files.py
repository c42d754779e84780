"""Writers of files: one of torch.save, or safetensors in Hugging Face's layout.

A file of torch.save has the nested state as it was before DCP flattened it. Its pickle refers to the tensors' bytes as
torch.save's does, and only the pickle is held in memory. The layout of safetensors is `model.safetensors`, or numbered
files and their index.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.payload_reader import Filling, WholeTensor, whole_tensors
from bucketpoint.convert.source import Source, exclude_option
from bucketpoint.convert.target import (
    DIGEST,
    TargetLayout,
    TargetPlace,
    file_name,
    former_weights,
    held,
    with_checksums,
)
from bucketpoint.dcp.planning.nested_state import nested
from bucketpoint.dcp.saving.commit_put import Commit, prior_commit, put_commit
from bucketpoint.errors import CommitConflictError, MetadataError, MismatchError, UnsafeDataError, first_of
from bucketpoint.format.pickles.items import read_item, settled
from bucketpoint.format.pickles.vocabulary import RefusedError, UnreadableError
from bucketpoint.format.safetensors_header import TensorEntry, encode_header, nameable, writable
from bucketpoint.format.tensor_bytes import contiguous_strides, tensor_bytes
from bucketpoint.format.torch_zip import STORAGE_NAMES, VERSION_RECORD, ArchiveWriter, frameable
from bucketpoint.stores import delete_all
from bucketpoint.transfer import ObjectSource, Segment, Uploaded
from bucketpoint.transfer.checksum import CrcAccumulator
from bucketpoint.transfer.pieces import batched

_PROTOCOL = 2  # that of torch.save


def plan_torch(source: Source, filling: Filling, name: str, *, trusted: bool = False) -> TargetLayout:
    """Plan one file with the whole state.

    Args:
        trusted: unpickle items other than tensors, whatever they name.

    Raises:
        UnsafeDataError: an item names something outside the allow-list.
        MismatchError: a tensor is not stored as plain elements.
        MetadataError: the metadata has an impossible path in the nested state for an item.
    """
    tensors = {tensor.fqn: tensor for tensor in whole_tensors(source)}
    fqns = source.metadata.state_dict_metadata
    values = {fqn: tensors.get(fqn) or _loaded(source, filling, fqn, trusted) for fqn in fqns}
    file = io.BytesIO()
    pickler = _ArchivePickler(file, filling)
    pickler.dump(nested(values, source.metadata, source.int_keys, url=source.url))
    archive = ArchiveWriter()
    archive.add(b"data.pkl", file.getvalue())
    archive.add(b"byteorder", b"little")
    archive.add(b"version", VERSION_RECORD)
    parts: list[Segment] = []
    sums: list[CrcAccumulator] = []
    for key, segment in pickler.segments.items():
        sums.append(CrcAccumulator(segment.nbytes, "crc32"))
        parts += [held(archive.add_payload(f"data/{key}".encode(), segment.nbytes)), _watched(segment, sums[-1])]
    nbytes = len(archive.trailer())

    def trailer(start: int, out: memoryview) -> None:
        # Includes the payloads' CRC32, which torch does not check, but other tools do.
        out[:] = archive.trailer([crc.total() for crc in sums])[start : start + len(out)]

    parts.append(Segment(nbytes, fill=trailer, late=True))
    # A single file needs no commit: its upload makes it visible only as a whole.
    return TargetLayout([with_checksums(ObjectSource(name, parts))], lambda uploaded: None, tensors=len(tensors))


@dataclass(frozen=True)
class _ArchiveStorage:
    """Storage of a tensor, pickled as a persistent id."""

    key: str
    kind: Any
    count: int


def _loaded(source: Source, filling: Filling, fqn: str, trusted: bool) -> Any:
    """Load an item that is not a tensor."""
    payload = source.payloads[MetadataIndex(fqn)]
    data = bytearray(payload.nbytes)
    filling.fill(payload, 0, memoryview(data))
    # Check again, because not every store guarantees that these bytes are those checked at the first read.
    try:
        if trusted:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        item = read_item(bytes(data))
        if item.saved:
            return settled(item.values[0])
    except RefusedError as error:
        raise UnsafeDataError(f"The pickle of the item names {error}", url=source.url, key=fqn) from None
    except UnreadableError:
        pass
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise MetadataError(f"The item cannot be loaded: {reason}", url=source.url, key=fqn) from error
    raise UnsafeDataError("The item is not in the format of torch.save", url=source.url, key=fqn)


def _watched(segment: Segment, crc: CrcAccumulator) -> Segment:
    """Return the segment with a `fill` that also adds each piece to `crc`."""
    if segment.fill is None:
        assert segment.data is not None
        crc.take(0, segment.data)
        return segment
    fetch = segment.fill

    def fill(start: int, out: memoryview) -> None:
        fetch(start, out)
        crc.take(start, out)

    return replace(segment, fill=fill)


class _ArchivePickler(pickle.Pickler):
    """Pickler that refers to tensors as torch.save's does, and collects their segments by storage key."""

    def __init__(self, file: io.BytesIO, filling: Filling) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._filling = filling
        self.segments: dict[str, Segment] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _ArchiveStorage):
            return "storage", value.kind, value.key, "cpu", value.count
        return None

    def reducer_override(self, value: Any, /) -> Any:
        if isinstance(value, WholeTensor):
            return self._reduced(value.dtype, value.shape, self._filling.whole(value))
        if isinstance(value, torch.Tensor):
            # A tensor in a tuple or an object, which DCP saves as one item.
            return self._reduced(value.dtype, tuple(value.shape), _bytes_of(value))
        return NotImplemented

    def _reduced(self, dtype: torch.dtype, shape: tuple[int, ...], segment: Segment) -> Any:
        key = str(len(self.segments))
        self.segments[key] = segment
        count, strides = prod(shape), contiguous_strides(shape)
        hooks: OrderedDict[str, Any] = OrderedDict()
        kind = STORAGE_NAMES.get(dtype)
        if kind is not None:
            storage = _ArchiveStorage(key, getattr(torch, kind), count)
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, False, hooks)
        storage = _ArchiveStorage(key, torch.storage.UntypedStorage, count * dtype.itemsize)
        return torch._utils._rebuild_tensor_v3, (storage, 0, shape, strides, False, hooks, dtype)


def _bytes_of(tensor: torch.Tensor) -> Segment:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not frameable(plain):
        raise MismatchError(f"A tensor of layout {tensor.layout} inside another object cannot be converted")
    # Keep the clone in a variable: the view into its memory does not keep it alive.
    whole = plain.cpu().clone(memory_format=torch.contiguous_format)
    return held(bytes(tensor_bytes(whole)))


# -- safetensors -------------------------------------------------------------------------------------------------------

_NAMED_AT_MOST = 5


def plan_safetensors(
    source: Source,
    filling: Filling,
    place: TargetPlace,
    names: Mapping[str, str],
    shard_bytes: int,
    file: str = "",
    digest: str = "",
    *,
    replaces: bool = False,
) -> TargetLayout:
    """Plan the files of all tensors. Items other than tensors are left out.

    Args:
        names: for each key to write, its name in the files.
        file: name of the one file to write; empty for the names of Hugging Face's layout.
        digest: digest of the conversion, stored in the index and the files' headers.
        replaces: the commit replaces the index that exists now, but not one that appears later, and then deletes the
            former weights. They may be the source under another name, so they must stay until all of it is read.

    Raises:
        MismatchError: no tensor is left, a tensor has a dtype or a key that safetensors cannot hold, or the tensors do
            not fit into the one file.
    """
    seen = prior_commit(place.store, place.prefix, INDEX_NAME) if replaces else None
    left_out = [
        fqn
        for fqn, entry in source.metadata.state_dict_metadata.items()
        if fqn not in names or not isinstance(entry, TensorStorageMetadata)
    ]
    tensors = whole_tensors(source, set(left_out))
    if not tensors:
        raise MismatchError(
            "The checkpoint has no tensor that is to be written",
            url=source.url,
            remedy="Check --prefix, --names and --exclude; `bucketpoint show URL --tensors` lists the keys",
        )
    unwritable = [tensor for tensor in tensors if not writable(tensor.dtype)]
    if unwritable:
        named = first_of([f"{tensor.fqn} ({tensor.dtype})" for tensor in unwritable], _NAMED_AT_MOST)
        raise MismatchError(
            f"safetensors does not support the dtype of {named}",
            url=source.url,
            remedy=f"Leave such tensors out by a pattern of their keys, such as {exclude_option(unwritable[0].fqn)}",
        )
    chosen = [replace(tensor, fqn=names[tensor.fqn]) for tensor in tensors]
    taken: set[str] = set()
    for tensor in chosen:
        if tensor.fqn in taken:
            raise MismatchError(f"Two tensors get the name {tensor.fqn!r}", url=source.url, remedy="Correct --names")
        taken.add(tensor.fqn)
        if not nameable(tensor.fqn):
            raise MismatchError(
                f"safetensors does not allow {tensor.fqn!r} as the name of a tensor",
                url=source.url,
                remedy="Leave the tensor out with --exclude",
            )
    shards = batched(chosen, lambda tensor: tensor.nbytes, shard_bytes)
    files = [file or SINGLE_NAME]
    if len(shards) > 1:
        if file:
            raise MismatchError(
                f"The tensors have more bytes than one file may have: {shard_bytes:,}",
                url=place.url,
                remedy="Pass --to safetensors with a folder as the target, or raise --max-shard-size",
            )
        files = [file_name(digest, number, len(shards)) for number in range(1, len(shards) + 1)]
    noted = {DIGEST: digest} if digest else {}
    objects = [_file(name, shard, filling, noted) for name, shard in zip(files, shards, strict=True)]

    def finish(uploaded: Sequence[Uploaded]) -> None:
        # A single file becomes visible as a whole by its upload, and for readers of the index by the index's deletion.
        if len(shards) > 1:
            request = Commit(place.store, place.prefix, place.url, "", INDEX_NAME, overwrite=replaces, seen=seen)
            put_commit(request, _index(files, shards, digest))
        elif replaces and prior_commit(place.store, place.prefix, INDEX_NAME) != seen:
            raise CommitConflictError("Another process wrote to the target during the conversion", url=place.url)
        elif seen is not None and seen.there:
            delete_all(place.store, [place.key(INDEX_NAME)])
        if replaces:
            delete_all(place.store, former_weights(place, files))

    return TargetLayout(objects, finish, left_out=left_out, tensors=len(chosen))


def _file(name: str, shard: Sequence[WholeTensor], filling: Filling, noted: Mapping[str, str]) -> ObjectSource:
    # Widest elements first, as in the safetensors library, so that every tensor is aligned to its element size.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    entries, position = [], 0
    for tensor in ordered:
        entries.append(TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, position))
        position += tensor.nbytes
    parts = [held(encode_header(entries, noted)), *map(filling.whole, ordered)]
    return with_checksums(ObjectSource(name, parts))


def _index(files: Sequence[str], shards: Sequence[Sequence[WholeTensor]], digest: str) -> bytes:
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    weight_map = {tensor.fqn: name for name, shard in zip(files, shards, strict=True) for tensor in shard}
    content = {"metadata": {"total_size": total, DIGEST: digest}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
