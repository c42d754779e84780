"""Safetensors as a target, in Hugging Face's layout: `model.safetensors`, or numbered files and their index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.checkpoint import TensorStorageMetadata

from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.payload_reader import Filling
from bucketpoint.convert.source import Source, exclude_option
from bucketpoint.convert.target import TargetLayout, TargetPlace, held, with_checksums
from bucketpoint.convert.tensors import WholeTensor, whole_tensors
from bucketpoint.dcp.saving.commit_put import Commit, put_commit
from bucketpoint.errors import MismatchError, first_of
from bucketpoint.format.safetensors_header import TensorEntry, encode_header, nameable, writable
from bucketpoint.transfer import ObjectSource, Uploaded
from bucketpoint.transfer.parts import batched

_NAMED_AT_MOST = 5

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file: the default of transformers, "5GB"."""


def plan_safetensors(
    source: Source, filling: Filling, place: TargetPlace, prefix: str, shard_bytes: int, file: str = ""
) -> TargetLayout:
    """Lay all tensors out in files. Items other than tensors are left out.

    Args:
        prefix: take only tensors whose keys begin with it, and remove it from the keys.
        file: name of the one file to write; empty for the names of Hugging Face's layout.

    Raises:
        MismatchError: no tensor is left, a tensor has a dtype or a key that safetensors cannot hold, or one file is too
            small for all.
    """
    left_out = [
        fqn
        for fqn, entry in source.metadata.state_dict_metadata.items()
        if not fqn.startswith(prefix) or not isinstance(entry, TensorStorageMetadata)
    ]
    tensors = whole_tensors(source, set(left_out))
    if not tensors:
        raise MismatchError(
            "The checkpoint has no tensor" + (f" whose key begins with {prefix!r}" if prefix else ""),
            url=source.url,
            remedy="Check --prefix and --exclude; `bucketpoint show URL --tensors` lists the keys of a DCP checkpoint",
        )
    unwritable = [tensor for tensor in tensors if not writable(tensor.dtype)]
    if unwritable:
        named = first_of([f"{tensor.fqn} ({tensor.dtype})" for tensor in unwritable], _NAMED_AT_MOST)
        raise MismatchError(
            f"safetensors does not support the dtype of {named}",
            url=source.url,
            remedy=f"Leave such tensors out by a pattern of their keys, such as {exclude_option(unwritable[0].fqn)}",
        )
    chosen = [replace(tensor, fqn=tensor.fqn[len(prefix) :]) for tensor in tensors]
    for tensor in chosen:
        if not nameable(tensor.fqn):
            raise MismatchError(
                f"safetensors does not allow {tensor.fqn!r} as the name of a tensor",
                url=source.url,
                remedy="Leave the tensor out with --exclude",
            )
    shards = batched(chosen, lambda tensor: tensor.nbytes, shard_bytes)
    names = [file or SINGLE_NAME]
    if len(shards) > 1:
        if file:
            raise MismatchError(
                f"The tensors have more bytes than one file may have: {shard_bytes:,}",
                url=place.url,
                remedy="Pass --to safetensors with a folder as the target, or raise --max-shard-size",
            )
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    objects = [_file(name, shard, filling) for name, shard in zip(names, shards, strict=True)]

    def finish(uploaded: Sequence[Uploaded]) -> None:
        # A single file needs no commit: its upload makes it appear whole or not at all.
        if len(shards) > 1:
            request = Commit(place.store, place.prefix, place.url, "", INDEX_NAME, overwrite=False)
            put_commit(request, _index(names, shards))

    return TargetLayout(objects, finish, left_out=left_out, tensors=len(chosen))


def _file(name: str, shard: Sequence[WholeTensor], filling: Filling) -> ObjectSource:
    # The widest elements first, as the library does: then every tensor is aligned to its element size.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    entries, position = [], 0
    for tensor in ordered:
        entries.append(TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, position))
        position += tensor.nbytes
    parts = [held(encode_header(entries)), *(tensor.segment(filling) for tensor in ordered)]
    return with_checksums(ObjectSource(name, parts))


def _index(names: Sequence[str], shards: Sequence[Sequence[WholeTensor]]) -> bytes:
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    weight_map = {tensor.fqn: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
