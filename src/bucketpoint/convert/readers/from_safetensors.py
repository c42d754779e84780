"""Safetensors as a source: one file, or the files that an index names, in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.convert.other_files import explain, missing_files
from bucketpoint.convert.safetensors_header import LENGTH_BYTES, TensorEntry, decode_header, decode_json, header_nbytes
from bucketpoint.convert.source import SAFETENSORS, Payload, Source, Stretch, describe, excluded_keys
from bucketpoint.convert.source_reader import SourceBytes
from bucketpoint.errors import MetadataError, ObjectNotFoundError, first_of
from bucketpoint.format import keys
from bucketpoint.transfer.pieces import MAX_READ_BYTES, for_each

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_AGAIN = "Index and files are not from one save: download all of them again, or save the model with its index again"


def read_file(
    source: SourceBytes, key: str, url: str, *, prefix: str = "", exclude: str | Iterable[str] = ()
) -> Source:
    """Plan the reading of one file, without the names to exclude. `prefix` is put before each name."""
    return _source(source, url, {key: _entries(source, key)}, prefix, exclude)


def read_index(
    source: SourceBytes, folder: str, url: str, *, prefix: str = "", exclude: str | Iterable[str] = ()
) -> Source:
    """Plan the reading of the files that the index in `folder` names.

    Raises:
        MetadataError: the index or a file is malformed, or they do not fit each other.
        CheckpointNotFoundError: files are missing.
    """
    name = keys.join(folder, INDEX_NAME)
    size = source.look(name).size
    if size > MAX_READ_BYTES:
        raise MetadataError(f"The index has {size} bytes, which is too many", url=url, key=name)
    try:
        named = decode_json(bytes(source.take(name, 0, size)), key=name).get("weight_map")
    except MetadataError as error:
        raise explain(source, name, error) from None
    if type(named) is not dict or not all(type(file) is str for file in named.values()):
        raise MetadataError("The index has no weight_map", url=url, key=name, remedy=_AGAIN)
    files: dict[str, list[tuple[TensorEntry, int]]] = {}
    gone: set[str] = set()

    def read(file: str) -> None:
        key = keys.join(folder, file)
        try:
            files[key] = _entries(source, key)
        except ObjectNotFoundError:
            gone.add(file)

    for_each(dict.fromkeys(named.values()), read, source.options)
    if gone:
        raise missing_files(gone, url)
    held = {entry.name: key for key, entries in files.items() for entry, _ in entries}
    for tensor, file in named.items():
        if held.get(tensor) != keys.join(folder, file):
            raise MetadataError(
                f"The index names {file} for a tensor that the file does not have",
                url=url,
                key=tensor[:200],
                remedy=_AGAIN,
            )
    more = sorted(held.keys() - named.keys())
    if more or sum(map(len, files.values())) != len(named):
        listed = first_of([f"{tensor[:200]} of {held[tensor].rpartition('/')[2]}" for tensor in more], 5)
        what = listed or "one tensor in two files"
        raise MetadataError(
            f"The files hold tensors that the index does not name: {what}", url=url, key=name, remedy=_AGAIN
        )
    return _source(source, url, dict(sorted(files.items())), prefix, exclude)


def _entries(source: SourceBytes, key: str) -> list[tuple[TensorEntry, int]]:
    size = source.look(key).size
    try:
        nbytes = header_nbytes(bytes(source.take(key, 0, min(LENGTH_BYTES, size))), size, key=key)
    except MetadataError as error:
        raise explain(source, key, error) from None
    first = LENGTH_BYTES + nbytes
    entries = decode_header(bytes(source.take(key, LENGTH_BYTES, nbytes)), size - first, key=key)
    return [(entry, first + entry.start) for entry in entries]


def _source(
    source: SourceBytes,
    url: str,
    files: Mapping[str, list[tuple[TensorEntry, int]]],
    prefix: str,
    exclude: str | Iterable[str],
) -> Source:
    excluded = excluded_keys(exclude, [entry.name for entries in files.values() for entry, _ in entries], url=url)
    places: dict[str, Stretch] = {}
    state: dict[str, torch.Tensor] = {}
    for key, entries in files.items():
        for entry, start in entries:
            if entry.name in excluded:
                continue
            name = prefix + entry.name
            places[name] = Stretch(key, start, entry.nbytes)
            state[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    metadata, tensors, _ = describe(state)
    payloads: dict[MetadataIndex, Payload] = {index: places[index.fqn] for index in tensors}
    return Source(SAFETENSORS, url, source, metadata, payloads, source.fingerprint(), excluded=excluded)
