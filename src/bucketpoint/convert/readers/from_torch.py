"""Reader of a file of torch.save: tensors are streamed from their positions, other values are serialized again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketpoint.checkpoint.safetensors_folder import HEAD_BYTES, explain
from bucketpoint.convert.readers.archive import Skeleton, open_archive
from bucketpoint.convert.source import TORCH, Held, Payload, Source, SourceBytes, describe, excluded_keys, without
from bucketpoint.dcp.planning.nested_state import int_keys_of
from bucketpoint.errors import MetadataError, MismatchError
from bucketpoint.format.metadata.facts import RepetitionError, nested_values

MAX_LOADED_BYTES = 64 << 20
"""Limit on the bytes of tensors inside of tuples and other objects (never weights), which are held in memory."""

_MOST_DEPTH = 200


def read_torch(
    source: SourceBytes, key: str, url: str, *, exclude: str | Iterable[str] = (), trusted: bool = False
) -> Source:
    """Plan the reading of a file of torch.save. Of tensors, only those inside of tuples and other objects are read.

    Raises:
        MetadataError: the file is not an archive, or is damaged.
        UnsafeDataError: the pickle names something outside the allow-list.
        MismatchError: the file does not contain a dictionary, or contains tensors that are not plain.
    """
    archive = open_archive(source, key, 0, source.look(key).size)
    if archive is None:
        not_ours = MetadataError(
            "The file is not an archive of torch.save",
            url=url,
            remedy="If the file is older than torch 1.6, load it with torch.load and save it again",
        )
        head = bytes(source.take(key, 0, min(HEAD_BYTES, source.look(key).size)))
        raise explain(head, source.store.url, key, not_ours)
    skeleton = Skeleton(archive, trusted=trusted)
    metadata, tensors, objects = describe(_as_state(skeleton.root, url))
    excluded = excluded_keys(exclude, metadata.state_dict_metadata, url=url)
    loaded = _storages_in([value for index, value in objects.items() if index.fqn not in excluded], skeleton)
    if loaded:
        nbytes = sum(archive.storages[name].nbytes for name in loaded)
        if nbytes > MAX_LOADED_BYTES:
            raise MismatchError(
                f"{nbytes} bytes of tensors are inside tuples and objects, which DCP does not search",
                url=url,
                remedy="Put the tensors into dictionaries or lists",
            )
        skeleton = Skeleton(archive, loaded=loaded, trusted=trusted)
        metadata, tensors, objects = describe(_as_state(skeleton.root, url))
    payloads: dict[MetadataIndex, Payload] = {
        index: skeleton.payload(tensor, index.fqn) for index, tensor in tensors.items() if index.fqn not in excluded
    }
    payloads.update((index, Held(_saved(value))) for index, value in objects.items() if index.fqn not in excluded)
    return Source(
        TORCH,
        url,
        source,
        without(metadata, excluded),
        payloads,
        source.fingerprint(),
        excluded=excluded,
        int_keys=int_keys_of(skeleton.root),
    )


def _check_repetition(root: Any, url: str) -> None:
    """Refuse dictionaries and lists that nest very deeply, or in which DCP would find too many values."""
    try:
        fits = all(depth <= _MOST_DEPTH or _parts(value) is None for value, depth in nested_values(root, _parts))
    except RepetitionError:
        fits = False
    if not fits:
        raise MismatchError(
            "The file holds dictionaries or lists that nest very deeply, or that occur in very many places", url=url
        )


def _parts(value: Any) -> Collection[Any] | None:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else None


def _as_state(root: Any, url: str) -> dict[str, Any]:
    if not isinstance(root, Mapping):
        raise MismatchError(
            f"The file holds a {type(root).__name__}, but a checkpoint must be a dictionary",
            url=url,
            remedy="Save it in a dictionary: torch.save({'model': ...}, path)",
        )
    _check_repetition(root, url)
    return dict(root)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _storages_in(values: Iterable[Any], skeleton: Skeleton) -> set[str]:
    """Return the keys of the storages of tensors inside of `values`."""
    finder = _Finder(skeleton)
    for value in values:
        finder.dump(value)
    return finder.storages


class _Finder(pickle.Pickler):
    """Pickler that is run only to find tensors inside of values; the output is discarded."""

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        self._skeleton = skeleton
        self.storages: set[str] = set()

    def reducer_override(self, value: Any, /) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        key = self._skeleton.storage_of(value)
        if key is not None:
            self.storages.add(key)
        return int, ()
