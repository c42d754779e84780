"""Metadata of a planned save, and the stub for ranks that did not commit it.

When a save is done, DCP sends the planner's metadata object to every rank. That would be the largest message of a save,
and no rank needs it, so a stub with the URL is sent instead.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from bucketpoint.dcp.planning.global_plan import GlobalPlan
from bucketpoint.errors import BucketpointError

_STOCK_FIELDS = tuple(field.name for field in dataclasses.fields(Metadata))


@dataclass
class WriterMeta(StorageMeta):
    """Storage metadata by which our planner recognises our writer: no other writer can handle `PlannedMetadata`."""


def _saved(url: str | None, committed: Any) -> str:
    """Return a short representation of a save. A notebook shows it where the metadata would fill a page."""
    return f"Saved({url}{f', {committed[0] / 1e6:.1f} MB, {committed[3]:.1f} s' if committed else ''})"


@dataclass(repr=False)
class PlannedMetadata(Metadata):
    """Metadata that our planner makes and our writer commits.

    Until the commit it is pickled as stock `Metadata`, after the commit as a small `RemoteMetadata`.

    Attributes:
        plan: the plan to which the metadata belongs.
        url: URL of the checkpoint, once it is committed.
        committed_at: the same, if other ranks are to read the metadata there.
        committed: bytes, step and metrics of the checkpoint, and seconds of the save, once it is committed: a plain
            tuple, which is short when it is pickled for the other ranks.
    """

    plan: GlobalPlan | None = field(default=None, repr=False, compare=False)
    url: str | None = field(default=None, repr=False, compare=False)
    committed_at: str | None = field(default=None, repr=False, compare=False)
    committed: Any = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return super().__repr__() if self.committed is None else _saved(self.url, self.committed)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.committed_at is not None:
            return RemoteMetadata, (self.committed_at, self.committed)
        attributes = vars(stock(self))
        if self.committed is not None:
            # A checkpoint process returns this to the trainer, whose handle shows it.
            attributes["committed"] = self.committed
        return Metadata, (self.state_dict_metadata,), attributes

    def __copy__(self) -> PlannedMetadata:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Metadata:
        # A deep copy is always full metadata, although a pickle may be a stub.
        return copy.deepcopy(stock(self), memo)


def stock(metadata: Metadata) -> Metadata:
    """Return a shallow copy of DCP's own class, with DCP's own fields."""
    return Metadata(**{name: getattr(metadata, name) for name in _STOCK_FIELDS})


class RemoteMetadata(Metadata):
    """Stub that `dcp.save` returns on all ranks but the coordinator, with the URL and the size."""

    def __init__(self, url: str, committed: Any = None) -> None:
        self.url = url
        self.committed = committed

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteMetadata, (self.url, self.committed)

    def __repr__(self) -> str:
        return _saved(self.url, self.committed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteMetadata) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)


def _elsewhere(self: RemoteMetadata) -> NoReturn:
    raise BucketpointError(
        "The metadata of the save is available only on the rank that committed it",
        url=self.url,
        remedy="On other ranks, read it with BucketReader(url).read_metadata()",
    )


for _name in _STOCK_FIELDS:
    setattr(RemoteMetadata, _name, property(_elsewhere))
