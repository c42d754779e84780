"""The metadata of a planned save: what the coordinator keeps beside it, and what the other ranks get of it. No I/O.

DCP sends the object that the planner made to every rank when the save is done. Whole, that is the largest message of a
save, and nobody needs it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.dealing import Dealing
from bucketpoint.dcp.nested import INT_KEYS, IntKeys, plain_int_keys
from bucketpoint.dcp.results import PackedResults, Results, results_of
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.format.columns import PAYLOAD_NBYTES, Columns, IndexColumns, Layout, index_columns
from bucketpoint.format.index import IndexTemplate, make_index
from bucketpoint.format.index_ref import IndexRef
from bucketpoint.format.int_columns import over
from bucketpoint.format.metadata_facts import without_gc
from bucketpoint.format.template import MetadataTemplate, make_template

_STOCK_FIELDS = tuple(one.name for one in dataclasses.fields(Metadata))


@dataclass
class WriterMeta(StorageMeta):
    """How a planner of ours recognises a writer of ours, which alone knows what to do with `PlannedMetadata`."""


@dataclass
class Agreed:
    """The coordinator's side of a kept plan.

    Attributes:
        entry: digest of who the ranks are, what each was dealt, and the metadata of it.
        senders: who the ranks are, in the whole job: another process group has others.
        asked: what each rank had asked for.
        plans: what each rank was dealt.
        digests: of the items of each.
        dealing: how it came about, if the ranks sent columns.
        int_keys: where dicts have integer keys, on any rank.
        layouts: where each rank's items lay when it last reported.
        complete: digests of the layouts of all ranks that were found to account for all items.
        template: of the metadata for these.
        index: the same of the index, if they have one.
    """

    entry: bytes
    senders: list[int]
    asked: list[SavePlan]
    plans: list[SavePlan]
    digests: list[bytes]
    metadata: Metadata
    dealing: Dealing | None = None
    int_keys: Sequence[IntKeys] = ()
    layouts: list[Layout | None] = field(init=False)
    complete: tuple[bytes, ...] | None = None
    template: MetadataTemplate | None = None
    index: IndexTemplate | None = None

    def __post_init__(self) -> None:
        self.layouts = [None] * len(self.plans)


@dataclass
class PlannedMetadata(Metadata):
    """What our writer commits: pickles as stock `Metadata` until then, and from then on as next to nothing.

    Attributes:
        agreed: the plan that it is the metadata of.
        known: the layouts that the ranks of this save were told are known.
        committed_at: URL of the checkpoint that holds it.
    """

    agreed: Agreed | None = field(default=None, repr=False, compare=False)
    known: tuple[Layout | None, ...] = field(default=(), repr=False, compare=False)
    committed_at: str | None = field(default=None, repr=False, compare=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.committed_at is not None:
            return RemoteMetadata, (self.committed_at,)
        return Metadata, (self.state_dict_metadata,), vars(stock(self))

    def __copy__(self) -> PlannedMetadata:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Metadata:
        # Copies are whole, whatever the next pickle will be.
        return copy.deepcopy(stock(self), memo)


def stock(metadata: Metadata) -> Metadata:
    """A shallow copy that is DCP's own class, with DCP's own fields."""
    return Metadata(**{name: getattr(metadata, name) for name in _STOCK_FIELDS})


class RemoteMetadata(Metadata):
    """What `dcp.save` returns on all ranks but the coordinator: a `Metadata` that says where its content is."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteMetadata, (self.url,)

    def __repr__(self) -> str:
        return f"RemoteMetadata({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteMetadata) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)


def _elsewhere(self: RemoteMetadata) -> NoReturn:
    raise BucketpointError(
        "The metadata of a checkpoint stays with the rank that committed it",
        url=self.url,
        remedy="Read it with BucketReader(url).read_metadata(), where it is needed",
    )


for _name in _STOCK_FIELDS:
    setattr(RemoteMetadata, _name, property(_elsewhere))


@dataclass(frozen=True)
class Reported:
    """What all ranks reported: results as DCP has them, or columns of those that have crossed.

    Attributes:
        agreed: the plan, if it came with its metadata.
        columns: of each rank; None for those that named their items themselves.
    """

    sent: Sequence[Any]
    metadata: Metadata
    agreed: Agreed | None
    columns: tuple[Columns | None, ...]

    @property
    def count(self) -> int:
        """How many items were reported."""
        return sum(
            len(each) if columns is None else columns.layout.count
            for each, columns in zip(self.sent, self.columns, strict=True)
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What the plan adds to the metadata."""
        found = self.agreed.int_keys if self.agreed is not None else ()
        return {INT_KEYS: plain_int_keys(found)} if found else {}

    def objects(self) -> dict[str, dict[str, Any]]:
        """Size and ETag of each object that is named in columns, by its path."""
        return {
            path: {"size": size, "etag": etag}
            for columns in self.columns
            if columns is not None
            for path, size, etag in columns.objects
            if size is not None
        }

    def note_complete(self, index: IndexTemplate | None = None) -> None:
        """Remember that no item is missing, and the pickle of all that will be the same at the next save."""
        digests = self._digests()
        if self.agreed is not None and digests is not None and digests != self.agreed.complete:
            items = index_columns([[item.index for item in plan.items] for plan in self.agreed.plans])
            self._remember(digests, items, index)

    def note_if_complete(self, *, indexed: bool) -> None:
        """The same before the first commit, if columns show that no item is missing: every rank reported all its own.

        Args:
            indexed: there is to be an index too.
        """
        agreed, digests = self.agreed, self._digests()
        dealing = agreed.dealing if agreed is not None else None
        if agreed is None or dealing is None or digests is None or digests == agreed.complete:
            return
        layouts = [columns.layout for columns in self.columns if columns is not None]
        stored = torch.cat([over(layout.column(PAYLOAD_NBYTES)) for layout in layouts])
        unlike = (stored >= 0) & (dealing.nbytes >= 0) & (stored != dealing.nbytes)
        if not unlike.any():
            reported = [each for each in self.columns if each is not None]
            index = make_index(agreed.metadata, dealing.index, reported) if indexed else None
            self._remember(digests, dealing.index, index)

    def _remember(self, digests: tuple[bytes, ...], items: IndexColumns | None, index: IndexTemplate | None) -> None:
        agreed = self.agreed
        if agreed is None:
            return
        columns = [each for each in self.columns if each is not None]
        agreed.template = None
        if items is not None:
            agreed.template = make_template(agreed.metadata, items, columns, indexed=index is not None)
        agreed.index = index
        agreed.complete = digests

    def results(self) -> list[list[WriteResult]]:
        """Each rank's results, one by one."""
        with without_gc():
            return [
                each if columns is None or self.agreed is None else results_of(self.agreed.plans[rank].items, columns)
                for rank, (each, columns) in enumerate(zip(self.sent, self.columns, strict=True))
            ]

    def index(self, bucketpoint: dict[str, Any], storage_meta: StorageMeta, version: tuple[str, ...]) -> bytes | None:
        """The index beside the metadata, if all but a few bytes of it are known already."""
        agreed = self.agreed
        if agreed is None or agreed.index is None or self._digests() != agreed.complete:
            return None
        columns = [each for each in self.columns if each is not None]
        ends = [4 * each.layout.count for each in columns]
        return agreed.index.fill(
            b"".join(each.checksums[:end] for each, end in zip(columns, ends, strict=True)),
            b"".join(each.checksums[end:] for each, end in zip(columns, ends, strict=True)),
            [path for each in columns for path, _, _ in each.objects],
            bucketpoint=bucketpoint,
            storage_meta=storage_meta,
            version=version,
        )

    def filled(self, end: dict[str, Any], index: IndexRef | None = None) -> bytes | None:
        """The metadata with `end` as its last attributes, if all but a few bytes of it are known already.

        They are if the same items lay in the same places at a save that was found to be complete.
        """
        agreed = self.agreed
        if agreed is None or agreed.template is None or self._digests() != agreed.complete:
            return None
        return agreed.template.fill([each for each in self.columns if each is not None], end, index)

    def _digests(self) -> tuple[bytes, ...] | None:
        """Of all ranks' layouts; None if one of them has none, or if somebody altered the metadata."""
        if self.agreed is None or any(columns is None for columns in self.columns):
            return None
        planned = self.agreed.metadata
        if self.metadata.state_dict_metadata is not planned.state_dict_metadata:
            return None
        if self.metadata.planner_data is not planned.planner_data:
            return None
        return tuple([columns.layout.digest for columns in self.columns if columns is not None])


def reported(results: Sequence[Any], metadata: Metadata) -> Reported:
    """Put together what the ranks reported and what the coordinator knew; what is new of it is kept for the next save.

    Raises:
        IncompleteSaveError: a rank's results do not fit what it was dealt.
    """
    agreed = metadata.agreed if isinstance(metadata, PlannedMetadata) else None
    columns: list[Columns | None] = []
    for rank, sent in enumerate(results):
        each = sent.packed() if isinstance(sent, Results) and agreed is not None else sent
        if not isinstance(each, PackedResults):
            columns.append(None)
            continue
        if agreed is None or not isinstance(metadata, PlannedMetadata) or rank >= len(agreed.plans):
            raise IncompleteSaveError(
                "The plan that the ranks refer to did not come with its metadata",
                remedy="A planner that alters the metadata of SavePlanner must use dataclasses.replace",
            )
        try:
            found = each.columns(len(agreed.plans[rank].items), metadata.known[rank])
        except BucketpointError as error:
            error.rank = rank
            raise
        agreed.layouts[rank] = found.layout
        columns.append(found)
    return Reported(results, metadata, agreed, tuple(columns))
