"""Reads of a checkpoint's metadata, from `.metadata`, its index, or the headers of a folder of safetensors.

`.metadata` and its index need one or two small requests. If there is no checkpoint, the error explains why.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bucketpoint.errors import (
    LISTED,
    AccessDeniedError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    CorruptDataError,
    IncompleteCheckpointError,
    MetadataError,
    ObjectNotFoundError,
    StoreError,
)
from bucketpoint.format import keys
from bucketpoint.format.index import ref as index_ref
from bucketpoint.format.index.ref import IndexRef
from bucketpoint.format.metadata.facts import MAX_METADATA_BYTES, extra
from bucketpoint.format.record import is_marker, parse_marker
from bucketpoint.stores import ObjectInfo, Store, check_url, this_url
from bucketpoint.stores.retry import READ_ATTEMPTS, retry_transient

logger = logging.getLogger(__name__)

_NAMED_AT_MOST = 5
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True)
class MetadataSource:
    """Reader of the metadata of one checkpoint. `dequantize` is as for `SafetensorsFolder`."""

    store: Store
    prefix: str
    url: str
    attempts: int = READ_ATTEMPTS
    max_bytes: int = MAX_METADATA_BYTES
    dequantize: bool = False

    def read(self, *, indexed: bool) -> bytes:
        """Read `.metadata`, or, if it is large, its index, which has the same content in fewer bytes.

        Args:
            indexed: True if the caller accepts an index.

        Raises:
            CheckpointNotFoundError: there is neither a committed checkpoint nor a folder of safetensors.
            CheckpointDeletedError: the checkpoint was deleted.
            BucketpointError: the safetensors cannot be read: see `SafetensorsFolder.read`.
        """
        head, info = self._or_safetensors(index_ref.HEAD_BYTES if indexed else None)
        whole = info.size <= len(head)
        ref = None if whole else index_ref.find_ref(head)
        index = None if ref is None else self._index(ref)
        if index is not None:
            return index
        data = head if whole else self.get(keys.METADATA)[0]
        if index_ref.is_index(data):
            raise MetadataError("The metadata object holds an index of bucketpoint, not DCP metadata", url=self.url)
        return data

    def read_whole(self) -> tuple[bytes, ObjectInfo]:
        """Read `.metadata`, or the metadata of safetensors, and the store's description of the object that was read."""
        return self._or_safetensors(None)

    def _or_safetensors(self, first: int | None) -> tuple[bytes, ObjectInfo]:
        try:
            return self._first(keys.METADATA, first)
        except CheckpointDeletedError:
            raise
        except (CheckpointNotFoundError, AccessDeniedError) as error:
            # Imported here, as tools that only inspect `.metadata` need no torch.
            from bucketpoint.checkpoint.safetensors_folder import SafetensorsFolder

            place = self.store, self.prefix, self.url
            folder = SafetensorsFolder(*place, self.attempts, self.max_bytes, dequantize=self.dequantize)
            try:
                data, info = folder.read()
            except (ObjectNotFoundError, AccessDeniedError):
                raise error from None
            if any(map(_is_data, self._names())):
                # A save here was not committed: the safetensors must not be loaded in its place.
                raise error from None
            return data, replace(info, size=len(data))

    def get(self, name: str) -> tuple[bytes, ObjectInfo]:
        """Read a metadata object, and the store's description of it.

        Raises:
            CheckpointNotFoundError: the object does not exist.
            CheckpointDeletedError: the checkpoint was deleted.
            MetadataError: the object is larger than `max_bytes`.
        """
        return self._first(name, None)

    def _first(self, name: str, first: int | None) -> tuple[bytes, ObjectInfo]:
        key = keys.join(self.prefix, name)
        get = functools.partial(self.store.get, key, first=first)
        if first is None:
            from bucketpoint.catalog.catalog import get_metadata

            get = functools.partial(get_metadata, self.store, key, max_bytes=self.max_bytes)
        try:
            data, info = retry_transient(get, attempts=self.attempts)
            if info.size > self.max_bytes:
                raise MetadataError(
                    f"The {name} object has {info.size} bytes, and at most {self.max_bytes} are read",
                    url=self.url,
                    remedy="If it is metadata, raise TransferOptions(max_metadata_bytes=...) to 16 times its size",
                )
        except ObjectNotFoundError:
            raise CheckpointNotFoundError(f"There is no {name} at {this_url(self.store)}", url=self.url) from None
        if first is not None and is_marker(data) and len(data) < info.size:
            return self._first(name, None)
        marker = parse_marker(data)
        if marker is not None:
            raise CheckpointDeletedError(marker.text, url=self.url)
        return data, info

    def _index(self, ref: IndexRef) -> bytes | None:
        """Read the index. None if it is missing, too large or does not fit `ref`: `.metadata` has the same content."""
        key = keys.join(self.prefix, ref.path)
        if ref.size > self.max_bytes:
            return None
        try:
            data, _ = retry_transient(lambda: self.store.get(key, max_bytes=ref.size), attempts=self.attempts)
        except (ObjectNotFoundError, AccessDeniedError, CorruptDataError) as error:
            # The checkpoint may have been overwritten between the two reads: then the new `.metadata` is read. S3
            # answers 403 instead of 404 to callers that may not list.
            logger.info("the index of %s cannot be read, so all of .metadata is read: %s", self.url, error)
            return None
        if not ref.fits(data):
            logger.warning("the index of %s is damaged, so all of .metadata is read", self.url)
            return None
        return data

    def nothing_here(self) -> CheckpointNotFoundError:
        """Return the error that explains why there is no checkpoint, from a LIST of the first 1,000 objects.

        Without permission to list, the error is that for an empty folder.
        """
        from bucketpoint.catalog.run import LOOKED_AT, other_files

        names = self._names()
        if keys.rank_metadata(0) in names:
            return CheckpointNotFoundError(
                "The checkpoint was saved without collectives (no_dist), so each rank has its own metadata",
                url=self.url,
                remedy="Load it with no_dist=True on as many ranks as saved it, and save it again with collectives",
            )
        newest, inside = self._below(names)
        if newest is not None:
            return CheckpointNotFoundError(
                "The URL is that of a run, not of a checkpoint. The newest checkpoints below it: "
                + ", ".join(inside[-_NAMED_AT_MOST:]),
                url=self.url,
                remedy=f"Pass the newest one: {self.url}/{newest} (bucketpoint.latest_checkpoint(root) finds it)",
            )
        if (error := other_files(names, self.url)) is not None:
            if not any(map(_is_data, names)):
                return error
            return IncompleteCheckpointError(
                f"{error.message}, and data of a save that was interrupted, failed, or is still running",
                url=self.url,
                remedy="Save again; or delete the data of the save, data/ and *.distcp, to load the other files",
            )
        if names:
            some = f"are {len(names)}{'+' if len(names) == LOOKED_AT else ''} objects"
            some = "is 1 object" if len(names) == 1 else some
            return IncompleteCheckpointError(
                f"There {some} here but no .metadata: the save was interrupted, failed, or is still running",
                url=self.url,
                remedy=f"Load another checkpoint: {LISTED}",
            )
        return CheckpointNotFoundError(
            f"There is no checkpoint at {this_url(self.store)}",
            url=self.url,
            remedy=f"{check_url(self.store, self.url)}; {LISTED}",
        )

    def _names(self) -> list[str]:
        """Return the names of the first 1,000 objects; none without permission to list."""
        from bucketpoint.catalog.run import names_below

        try:
            return names_below(self.store, self.prefix)
        except StoreError as failure:
            logger.debug("could not list %s: %s", self.url, failure)
            return []

    def _below(self, names: Sequence[str]) -> tuple[str | None, list[str]]:
        """Return the folder of the newest checkpoint below the URL, and the folders of all checkpoints found.

        The newest checkpoint has the highest number in its name; without numbers, it is the last by name.
        """
        from bucketpoint.catalog.catalog import newest_folder

        inside = {name.removesuffix("/" + keys.METADATA) for name in names if name.endswith("/" + keys.METADATA)}
        try:
            # All of `names` may belong to the oldest checkpoint.
            newest = newest_folder(self.store, self.prefix) if any("/" in name for name in names) else None
        except StoreError as error:
            logger.debug("could not look below %s: %s", self.url, error)
            newest = None
        folders = sorted(inside | ({newest} if newest is not None else set()), key=_by_number)
        return newest or (folders[-1] if folders else None), folders


def _is_data(path: str) -> bool:
    """Return True for an object of a save, by any writer. Folders below may be other checkpoints and do not count."""
    saved = path.endswith(".distcp") or keys.is_rank_metadata(path)
    return path == keys.METADATA or keys.parse_data_path(path) is not None or ("/" not in path and saved)


def _by_number(folder: str) -> list[tuple[int, str]]:
    """Return a sort key that orders the numbers in folders' names by value: `step-500` before `step-1000`."""
    return [(len(part.lstrip("0")) if part.isdecimal() else 0, part) for part in _DIGITS.split(folder)]


def committed_etags(metadata: Any, store: Store, url: str | None) -> dict[str, str]:
    """Return the ETags that a load requires. Empty for a copy of the checkpoint, whose objects have other ETags."""
    facts = extra(metadata)
    if not store.capabilities.pinned_reads or facts.get("url") != url or facts.get("endpoint") != store.identity:
        return {}
    return {path: entry["etag"] for path, entry in facts.get("objects", {}).items() if entry.get("etag")}
