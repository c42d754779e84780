"""The alarm for an optimizer whose moments do not change: their checksums are compared from save to save of a run.

It runs after the commit, on the coordinator, with the CRC32C that the upload of every item has computed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bucketpoint.dcp.planning.results import RankResults
from bucketpoint.format import keys
from bucketpoint.format.columns import OBJECT, PAYLOAD_NBYTES, Columns
from bucketpoint.format.groups import OPTIM
from bucketpoint.format.item_info import read_item

logger = logging.getLogger(__name__)

_ELEMENT_BYTES = 8
"""Largest size of one element: larger tensors of an optimizer are moments, others may be its counts of steps."""

_ALARM = (
    "no byte of the optimizer's moments (group %r) changed in %s, although training went on: they have not changed "
    "since %s. The optimizer may no longer step, or the state that is saved may be a stale copy. Check that "
    "the optimizer whose state is saved is the one on which training calls step(); if it should not change, "
    "ignore this warning"
)

_STILL_SAVES = 2
"""Saves in a row, each of a higher step than the one before, in which moments did not change before there is an alarm.
A first try of the library saves twice without training."""


@dataclass
class _Moments:
    """The moments of one group of objects, as the last save with such a group had them.

    Attributes:
        digest: of their checksums.
        url: of that save.
        changed: URL of the last save in which they changed; None if they have not.
        still: saves of higher steps since then.
    """

    digest: bytes
    url: str
    changed: str | None = None
    still: int = 0


class MomentsWatch:
    """The memory of one run's saves, on the coordinator. An alarm is given once, until the moments change again."""

    def __init__(self) -> None:
        self._groups: dict[str, _Moments] = {}

    def look(self, url: str, digests: Mapping[str, bytes]) -> None:
        """Compare a committed save with the last one, and warn of moments that do not change while training continues.

        Args:
            digests: the result of `checksum_digests`.
        """
        for group, digest in digests.items():
            last = self._groups.setdefault(group, _Moments(digest, url))
            if digest != last.digest:
                last.changed, last.still = url, 0
            elif is_later(url, last.url):
                last.still += 1
                if last.still == _STILL_SAVES:
                    logger.warning(_ALARM, group, url, last.changed or "the first save of this process")
            last.digest, last.url = digest, url


_NUMBER = re.compile(r"^(.*?)([0-9]+)$", re.DOTALL)


def is_later(url: str, last: str) -> bool:
    """Return True if two folders have one name with a number at its end, and the number of `url` is higher."""
    before, now = (_NUMBER.match(each.rstrip("/").rpartition("/")[2]) for each in (last, url))
    if before is None or now is None or before[1] != now[1]:
        return False
    # Compared as text: a folder's name may have more digits than Python converts.
    (older, newer) = (each[2].lstrip("0") for each in (before, now))
    return (len(newer), newer) > (len(older), older)


def checksum_digests(results: RankResults) -> dict[str, bytes]:
    """Return a digest of the checksums of the moments in each group of objects."""
    digests: dict[str, Any] = {}
    for sent, columns in zip(results.sent, results.columns, strict=True):
        for group, checksums in _of_items(sent) if columns is None else _of_columns(columns):
            digests.setdefault(group, hashlib.blake2b(digest_size=16)).update(checksums)
    return {group: digest.digest() for group, digest in digests.items()}


def _of_columns(columns: Columns) -> Iterator[tuple[str, bytes]]:
    """Yield the checksums of one rank's moments by group, without an object for each item."""
    checksums = np.frombuffer(columns.checksums, "<u4")
    objects, sizes = (np.asarray(columns.layout.column(number)) for number in (OBJECT, PAYLOAD_NBYTES))
    groups = [_watched(path) for path, _, _ in columns.objects]
    for group in sorted({group for group in groups if group is not None}):
        mine = checksums[np.array([each == group for each in groups])[objects] & (sizes > _ELEMENT_BYTES)]
        if mine.size:
            yield group, mine.tobytes()


def _of_items(results: Sequence[Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the same for results that name their items."""
    for result in results:
        info = read_item(result.storage_data)
        group = _watched(info.path)
        if group is not None and (info.payload_nbytes or 0) > _ELEMENT_BYTES:
            yield group, (info.crc32c or 0).to_bytes(4, "little")


def _watched(path: str) -> str | None:
    """Return the group of an object if it is one of an optimizer, else None."""
    named = keys.parse_data_path(path)
    return named[2] if named is not None and OPTIM in named[2] else None
