"""Where a load's metadata comes from: `.metadata`, or the index that it names; and why there is none.

One or two small requests. Nothing is decoded here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.distributed.checkpoint import Metadata

from bucketpoint.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    CorruptDataError,
    IncompleteCheckpointError,
    MetadataError,
    ObjectNotFoundError,
    StoreError,
)
from bucketpoint.format import index_ref, keys
from bucketpoint.format.index_read import is_index
from bucketpoint.format.index_ref import IndexRef
from bucketpoint.stores import ObjectInfo, Store
from bucketpoint.transfer import retry_transient

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 16 << 30
"""Far above what any job writes: only there so that a wrong object is refused before it fills the memory."""


@dataclass(frozen=True)
class MetadataSource:
    """A checkpoint's URL, and how to read there."""

    store: Store
    prefix: str
    url: str
    attempts: int

    def read(self, *, indexed: bool) -> bytes:
        """`.metadata`; or instead of a large one the index that it names, which says the same in fewer bytes.

        Args:
            indexed: whether an index will do.

        Raises:
            CheckpointNotFoundError: nothing is committed here.
        """
        head, info = self._first(keys.METADATA, index_ref.HEAD_BYTES if indexed else None)
        whole = info.size <= len(head)
        ref = None if whole else index_ref.find_ref(head)
        index = None if ref is None else self._index(ref)
        if index is not None:
            return index
        data = head if whole else self.get(keys.METADATA)
        if is_index(data):
            raise MetadataError("The metadata object is an index and not DCP's metadata", url=self.url)
        return data

    def get(self, name: str) -> bytes:
        """A metadata object.

        Raises:
            CheckpointNotFoundError: it is not there.
        """
        return self._first(name, None)[0]

    def _first(self, name: str, first: int | None) -> tuple[bytes, ObjectInfo]:
        key = keys.join(self.prefix, name)
        try:
            return retry_transient(
                lambda: self.store.get(key, max_bytes=MAX_METADATA_BYTES, first=first), attempts=self.attempts
            )
        except ObjectNotFoundError:
            raise CheckpointNotFoundError(f"There is no {name} here", url=self.url) from None

    def _index(self, ref: IndexRef) -> bytes | None:
        """The index, if it is the one that is meant. Whatever is wrong with it, `.metadata` says the same."""
        key = keys.join(self.prefix, ref.path)
        try:
            data, _ = retry_transient(lambda: self.store.get(key, max_bytes=ref.size), attempts=self.attempts)
        except (ObjectNotFoundError, AccessDeniedError, CorruptDataError) as error:
            # Also what an overwrite between the two reads looks like: what is there now is then read as a whole. S3
            # answers 403 instead of 404 to those who may not list.
            logger.info("the index of %s cannot be read, so all of its metadata is: %s", self.url, error)
            return None
        if not ref.fits(data):
            logger.warning("the index of %s is damaged, so all of its metadata is read", self.url)
            return None
        return data

    def nothing_here(self) -> CheckpointNotFoundError:
        """Why there is no checkpoint: looked up on this path alone, as a load that works never lists anything."""
        found = []
        try:
            for info in self.store.list(self.prefix + "/" if self.prefix else ""):
                found.append(info)
                if len(found) == 1000:
                    break
        except StoreError as error:
            logger.debug("could not list %s: %s", self.url, error)
        if found:
            return IncompleteCheckpointError(
                f"There are {len(found)}{'+' if len(found) == 1000 else ''} objects here and no .metadata: a save that "
                "was interrupted, failed, or is still running",
                url=self.url,
                remedy="Load another checkpoint: bucketpoint.latest_checkpoint(root) names the newest whole one",
            )
        return CheckpointNotFoundError(
            "There is no checkpoint here",
            url=self.url,
            remedy="Check the URL: bucketpoint.latest_checkpoint(root) names the newest whole one under a root",
        )


class Unread(Metadata):
    """Stands for metadata that could not be read, until DCP touches it: then the reason is raised."""

    def __init__(self, reason: Exception) -> None:
        self.__dict__["_reason"] = reason

    def fail(self) -> NoReturn:
        raise self.__dict__["_reason"]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
            raise object.__getattribute__(self, "__dict__")["_reason"]
        return object.__getattribute__(self, name)
