"""`Location`: a URL with the options of its store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

from bucketpoint.stores import Store, as_url, open_store


@dataclass(frozen=True)
class Location:
    """A URL with the options of its store, which is opened on first use, without a request.

    The options may hold credentials, so the `repr` shows the URL alone, and a `Location` cannot be pickled.

    Attributes:
        url: the URL in the form of `as_url`; empty if there is none.
        storage_options, fs: as for `open_store`.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    fs: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, place: Place | None, storage_options: Mapping[str, Any] | None = None, fs: Any = None) -> Location:
        """Return the location of a URL; `place` itself if it is a location."""
        if isinstance(place, Location):
            return place
        return cls(as_url(place) or "", dict(storage_options or {}), fs)

    def at(self, url: str | os.PathLike[str]) -> Location:
        """Return the location of another URL, with the same options."""
        return replace(self, url=as_url(url) or "")

    @cached_property
    def opened(self) -> tuple[Store, str]:
        """The store that serves the URL, and the URL's key prefix. Raises as `open_store`."""
        return open_store(self.url, storage_options=self.storage_options, fs=self.fs)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Location is not pickled, as its options may hold credentials")


Place = str | os.PathLike[str] | Location
"""A URL or path, or a `Location`."""


def parent_and_name(url: str) -> tuple[str, str] | None:
    """Split a checkpoint's URL into root and folder; None if the URL has no folder above the checkpoint's."""
    above, slash, name = (as_url(url) or "").rpartition("/")
    if not name or name in (".", "..") or above.endswith((":", "/")) or (slash and not above):
        return None
    # A bucket is not a folder: `s3://bucket` gave None above, because its `above` ends with the scheme's slash.
    return above or ".", name
