"""Writer of safetensors in Hugging Face's layout: `model.safetensors`, or numbered files and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.distributed.checkpoint import TensorStorageMetadata

from bucketpoint.checkpoint.safetensors_folder import INDEX_NAME, SINGLE_NAME
from bucketpoint.convert.payload_reader import Filling, WholeTensor, whole_tensors
from bucketpoint.convert.source import Source, exclude_option
from bucketpoint.convert.target import DIGEST, TargetLayout, TargetPlace, file_name, held, with_checksums
from bucketpoint.dcp.saving.commit_put import Commit, put_commit
from bucketpoint.errors import MismatchError, first_of
from bucketpoint.format.safetensors_header import TensorEntry, encode_header, nameable, writable
from bucketpoint.transfer import ObjectSource, Uploaded
from bucketpoint.transfer.pieces import batched

_NAMED_AT_MOST = 5


def plan_safetensors(
    source: Source,
    filling: Filling,
    place: TargetPlace,
    names: Mapping[str, str],
    shard_bytes: int,
    file: str = "",
    digest: str = "",
) -> TargetLayout:
    """Plan the files of all tensors. Items other than tensors are left out.

    Args:
        names: for each key to write, its name in the files.
        file: name of the one file to write; empty for the names of Hugging Face's layout.
        digest: digest of the conversion, stored in the index and the files' headers.

    Raises:
        MismatchError: no tensor is left, a tensor has a dtype or a key that safetensors cannot hold, or the tensors do
            not fit into the one file.
    """
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
        # A single file needs no commit: its upload makes it visible only as a whole.
        if len(shards) > 1:
            request = Commit(place.store, place.prefix, place.url, "", INDEX_NAME, overwrite=False)
            put_commit(request, _index(files, shards, digest))

    return TargetLayout(objects, finish, left_out=left_out, tensors=len(chosen))


def _file(name: str, shard: Sequence[WholeTensor], filling: Filling, noted: Mapping[str, str]) -> ObjectSource:
    # Widest elements first, as in the safetensors library, so that every tensor is aligned to its element size.
    ordered = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    entries, position = [], 0
    for tensor in ordered:
        entries.append(TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, position))
        position += tensor.nbytes
    parts = [held(encode_header(entries, noted)), *(tensor.segment(filling) for tensor in ordered)]
    return with_checksums(ObjectSource(name, parts))


def _index(files: Sequence[str], shards: Sequence[Sequence[WholeTensor]], digest: str) -> bytes:
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    weight_map = {tensor.fqn: name for name, shard in zip(files, shards, strict=True) for tensor in shard}
    content = {"metadata": {"total_size": total, DIGEST: digest}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
