"""Detection of a source's format, and opening of the store that a URL names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from bucketpoint.catalog.run import names_below, other_files
from bucketpoint.checkpoint.open import open_checkpoint, open_safetensors
from bucketpoint.checkpoint.safetensors_folder import HEAD_BYTES, explain
from bucketpoint.convert.from_dcp import read_dcp
from bucketpoint.convert.from_torch import read_torch
from bucketpoint.convert.source import (
    BUCKETPOINT,
    DCP,
    SAFETENSORS,
    SAFETENSORS_SUFFIX,
    TARGETS,
    TORCH,
    TORCH_SUFFIXES,
    Source,
    SourceBytes,
)
from bucketpoint.errors import (
    BucketpointError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    InvalidURLError,
    MetadataError,
    ObjectNotFoundError,
)
from bucketpoint.format import keys
from bucketpoint.location import Location
from bucketpoint.stores import Store, check_url, parse_url, this_url
from bucketpoint.transfer import TransferOptions

AUTO = "auto"

_OTHER_FILES = (".npz", ".npy", ".pkl", ".pickle", ".h5", ".onnx", ".gguf", ".msgpack", ".gz", ".zip", ".tar")
"""Endings of files that no conversion writes."""

_EXTRAS = {"msc": "pip install multi-storage-client, or pass the URL that the profile refers to"}
"""Remedies for URL schemes of other packages, which fsspec does not list."""


def open_place(place: Location) -> tuple[Store, str]:
    """Open a store as `open_store` does. If a scheme needs a package that is missing, the error names the package."""
    try:
        return place.opened
    except InvalidURLError as error:
        if place.fs is None:
            error.remedy = _EXTRAS.get(parse_url(place.url)[0], error.remedy)
        raise


def open_object(place: Location) -> tuple[Store, str]:
    """Return the store and the key of the object that a URL names. Raises InvalidURLError if the URL has no key."""
    above, slash, name = place.url.rpartition("/")
    if slash and (not above or above.endswith((":", "/"))):
        above += "/"
    if not name or name in (".", "..") or above.endswith("://"):
        raise InvalidURLError(
            "the URL names no file", url=place.url, remedy="Pass the URL of a file, such as s3://bucket/model.pt"
        )
    store, prefix = open_place(place.at(above or "."))
    return store, keys.join(prefix, name)


def format_of(url: str, wanted: str, source: Source) -> str:
    """Return the format of the target: `wanted`, or for `"auto"` that of the URL's ending, or else bucketpoint."""
    if wanted == DCP:
        raise BucketpointError("dcp is not a target", remedy="Use the format bucketpoint: torch's readers read it")
    if wanted not in (AUTO, *TARGETS):
        raise BucketpointError(f"{wanted!r} is not a format", remedy=f"Use one of {', '.join(TARGETS)}")
    named = TORCH if url.endswith(TORCH_SUFFIXES) else SAFETENSORS if url.endswith(SAFETENSORS_SUFFIX) else AUTO
    if wanted == AUTO:
        wanted = named
    if named not in (AUTO, wanted):
        raise InvalidURLError(
            f"The target has the name of a file of {named}, and --to is {wanted}",
            url=url,
            remedy="Leave --to out, or name another target",
        )
    if wanted != AUTO:
        return wanted
    if url.endswith(_OTHER_FILES):
        raise InvalidURLError(
            "The target has the name of a file of another format",
            url=url,
            remedy="End the name in .pt or .safetensors, or pass --to bucketpoint for a folder of this name",
        )
    if source.format == BUCKETPOINT:
        raise InvalidURLError(
            "The source is already a checkpoint in the format bucketpoint",
            url=source.url,
            remedy="Pass the target format with --to, or copy the checkpoint unchanged with `bucketpoint cp`",
        )
    return BUCKETPOINT


def open_source(
    place: Location,
    format: str = AUTO,  # noqa: A002
    *,
    prefix: str = "",
    exclude: str | Iterable[str] = (),
    trusted: bool = False,
    transfer: TransferOptions,
) -> Source:
    """Plan the reading of the checkpoint or file at a place. Only metadata and items other than tensors are read.

    Args:
        format: one of `FORMATS`, or `"auto"`: the first that exists of a commit, a safetensors index or file, and a
            file of torch.save.
        prefix: put before each key if the source is safetensors.
        exclude: patterns of the source's keys to leave out.

    Raises:
        CheckpointNotFoundError: there is no checkpoint or file of a known format.
        BucketpointError: the source cannot or must not be read; see `read_dcp` and `read_torch`.
    """
    text = place.url
    store, folder = open_place(place)
    missing = CheckpointNotFoundError(
        f"There is no checkpoint in the format {format} at {this_url(store)}",
        url=text,
        remedy=check_url(store, text),
    )
    saved = None
    if format in (AUTO, BUCKETPOINT, DCP):
        try:
            saved = open_checkpoint(place, trusted=trusted, safetensors=format == AUTO)
        except CheckpointNotFoundError as error:
            if format != AUTO:
                raise
            missing = error
        except MetadataError as error:
            try:
                head, _ = store.get(keys.join(folder, keys.METADATA), first=HEAD_BYTES)
            except ObjectNotFoundError:
                raise error from None
            raise explain(head, store.url, keys.join(folder, keys.METADATA), error) from None
    elif format == SAFETENSORS:
        with contextlib.suppress(ObjectNotFoundError):
            saved = open_safetensors(text, store, folder)
    if saved is not None:
        return read_dcp(SourceBytes(saved.store, transfer), saved, prefix=prefix, exclude=exclude, trusted=trusted)
    if not isinstance(missing, CheckpointDeletedError):
        missing = other_files(names_below(store, folder), text) or missing
    try:
        store, key = open_object(place)
    except InvalidURLError:
        raise missing from None
    source = SourceBytes(store, transfer)
    if not source.has(key):
        if text.endswith(keys.FILE_SUFFIXES) and type(missing) is CheckpointNotFoundError:
            raise CheckpointNotFoundError(
                f"There is no file at {this_url(store)}", url=text, remedy=check_url(store, text)
            ) from None
        raise missing
    if format == TORCH or (format == AUTO and not text.endswith(SAFETENSORS_SUFFIX)):
        return read_torch(source, key, text, exclude=exclude, trusted=trusted)
    above, _, name = key.rpartition("/")
    return read_dcp(source, open_safetensors(text, store, above, name), prefix=prefix, exclude=exclude)
