"""Metadata of a planned save: the plan that the coordinator caches with it, and the stub that other ranks receive.

When a save is done, DCP sends the planner's metadata object to every rank. In full that is the largest message of a
save, and no rank needs it, so a stub with the URL is sent instead.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import uuid
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from bucketpoint.dcp.planning.columnar.assign import Assignment
from bucketpoint.dcp.planning.columnar.assignments import KnownItems
from bucketpoint.dcp.planning.columnar.encoding import LocalItems
from bucketpoint.dcp.planning.nested_state import INT_KEYS, IntKeys, plain_int_keys
from bucketpoint.dcp.planning.results import PackedResults, Results, results_of
from bucketpoint.errors import BucketpointError, IncompleteSaveError
from bucketpoint.forks import renew_in_child
from bucketpoint.format.columns import PAYLOAD_NBYTES, Columns, IndexColumns, ItemColumns, index_columns
from bucketpoint.format.index.encode import IndexTemplate, make_index
from bucketpoint.format.index.int_columns import over
from bucketpoint.format.index.ref import IndexRef
from bucketpoint.format.metadata.coverage import uncovered
from bucketpoint.format.metadata.facts import without_gc
from bucketpoint.format.metadata.template import MetadataTemplate, make_template

_NAMED_AT_MOST = 6

KEPT_PLANS = 4
"""Plans that one planner keeps, each for another structure: two models and two optimizers, each saved separately."""

_STOCK_FIELDS = tuple(field.name for field in dataclasses.fields(Metadata))


@dataclass
class WriterMeta(StorageMeta):
    """Storage metadata by which our planner recognises our writer: no other writer can handle `PlannedMetadata`."""


@dataclass
class CachedPlan:
    """A cached plan as the coordinator keeps it.

    Attributes:
        entry: digest of the ranks, the items that each was assigned, and their metadata.
        senders: global ranks, which differ between process groups.
        asked: plan that each rank had sent.
        plans: plan that each rank was assigned.
        digests: digest of the items of each assigned plan.
        assignment: the assignment over columns, if the ranks sent columns.
        int_keys: paths of dicts with integer keys, on any rank.
        layouts: places of each rank's items when the rank last reported; None if it never has.
        content: digest of what the ranks had sent, if plans are found again by it.
        complete: digests of a set of layouts of all ranks in which no item is missing.
        template: template of the metadata for the layouts in `complete`.
        index: template of the index for these layouts, if they have an index.
        uncovered: tensors of which the ranks do not hold all, see `uncovered`; None until the first commit.
    """

    entry: bytes
    senders: list[int]
    asked: list[SavePlan]
    plans: list[SavePlan]
    digests: list[bytes]
    metadata: Metadata
    assignment: Assignment | None
    int_keys: Sequence[IntKeys]
    layouts: list[ItemColumns | None]
    content: bytes | None = None
    complete: tuple[bytes, ...] | None = None
    template: MetadataTemplate | None = None
    index: IndexTemplate | None = None
    uncovered: list[tuple[str, str]] | None = None


@dataclass
class KeptPlan:
    """A rank's part of a plan that all ranks have agreed on, and the items that the rank had asked for."""

    entry: bytes
    signature: Hashable
    asked: LocalItems
    plan: SavePlan
    confirmed: bool = True

    @property
    def is_unaltered(self) -> bool:
        """True if the plan still holds the items that the rank was assigned."""
        return isinstance(self.plan.items, KnownItems) and self.plan.items.unaltered


@dataclass
class PlanCache:
    """Everything that a planner keeps between saves, oldest first. The coordinator keeps plans longer than the ranks.

    Attributes:
        identity: finds the plans again in a checkpoint process, which receives the planner anew for each save.
        coordinators: global ranks of the coordinators that have assigned plans to this rank.
    """

    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    kept: list[KeptPlan] = field(default_factory=list)
    agreed: dict[bytes, CachedPlan] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    coordinators: set[int] = field(default_factory=set)


class SparePlans:
    """Plans that a writer keeps between saves. One save uses them at a time; one that overlaps it plans anew."""

    def __init__(self) -> None:
        self._spare: list[PlanCache] = []
        # Two forks would answer for each other's plans, which they find by the identity of the cache.
        renew_in_child(self, lambda spare: spare._spare.clear())

    def take(self) -> PlanCache:
        """Return the plans of earlier saves, or none if another save uses them."""
        try:
            return self._spare.pop()
        except IndexError:
            return PlanCache()

    def give_back(self, cache: PlanCache) -> None:
        """Keep the plans for the next save."""
        self._spare[:] = [cache]

    def __reduce__(self) -> tuple[Any, ...]:
        # The checkpoint process finds its plans by their identity.
        return SparePlans, ()


@dataclass
class PlannedMetadata(Metadata):
    """Metadata that our planner makes and our writer commits.

    Until the commit it is pickled as stock `Metadata`, after the commit as a small `RemoteMetadata`.

    Attributes:
        agreed: the plan to which the metadata belongs.
        known: layouts that the ranks of this save were told the coordinator knows.
        committed_at: URL of the checkpoint, once it is committed.
        committed: bytes, step and metrics of the checkpoint, once it is committed: a plain tuple, which is short when
            it is pickled for the other ranks.
    """

    agreed: CachedPlan | None = field(default=None, repr=False, compare=False)
    known: tuple[ItemColumns | None, ...] = field(default=(), repr=False, compare=False)
    committed_at: str | None = field(default=None, repr=False, compare=False)
    committed: Any = field(default=None, repr=False, compare=False)

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
    """Stub that `dcp.save` returns on all ranks but the coordinator: it knows the URL and the size."""

    def __init__(self, url: str, committed: Any = None) -> None:
        self.url = url
        self.committed = committed

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteMetadata, (self.url, self.committed)

    def __repr__(self) -> str:
        return f"RemoteMetadata({self.url!r})"

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


@dataclass(frozen=True)
class RankResults:
    """The results that all ranks reported: lists of results as in DCP, or columns.

    Attributes:
        sent: the results of each rank, as received.
        agreed: the plan, if the metadata is a `PlannedMetadata`.
        columns: columns of each rank; None for a rank whose results name their items.
    """

    sent: Sequence[Any]
    metadata: Metadata
    agreed: CachedPlan | None
    columns: tuple[Columns | None, ...]

    @property
    def count(self) -> int:
        """Number of items that were reported."""
        return sum(
            len(each) if columns is None else columns.layout.count
            for each, columns in zip(self.sent, self.columns, strict=True)
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Values that the plan adds to the metadata."""
        return (
            {INT_KEYS: plain_int_keys(self.agreed.int_keys)} if self.agreed is not None and self.agreed.int_keys else {}
        )

    @property
    def known(self) -> list[Columns]:
        """Columns of the ranks that sent columns."""
        return [columns for columns in self.columns if columns is not None]

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return size and ETag of each object that is named in columns, by path."""
        return {
            path: {"size": size, "etag": etag}
            for columns in self.known
            for path, size, etag in columns.objects
            if size is not None
        }

    def note_complete(self, index: IndexTemplate | None = None) -> None:
        """Remember that no item is missing, and make templates of the bytes that will be the same at the next save."""
        agreed = self._plan_without_templates()
        if agreed is not None:
            self._remember(agreed, index_columns([[item.index for item in plan.items] for plan in agreed.plans]), index)

    def note_if_complete(self, *, indexed: bool) -> None:
        """Remember, before the first commit, that no item is missing, if the columns show it.

        They do if every rank reported all its items, with the sizes that the plan expects.

        Args:
            indexed: the checkpoint gets an index too.
        """
        agreed = self._plan_without_templates()
        if agreed is None or agreed.assignment is None:
            return
        stored = torch.cat([over(columns.layout.column(PAYLOAD_NBYTES)) for columns in self.known])
        expected, items = agreed.assignment.nbytes, agreed.assignment.index
        if not ((stored >= 0) & (expected >= 0) & (stored != expected)).any():
            self._remember(agreed, items, make_index(agreed.metadata, items, self.known) if indexed else None)

    def _remember(self, agreed: CachedPlan, items: IndexColumns | None, index: IndexTemplate | None) -> None:
        agreed.template = None
        if items is not None:
            agreed.template = make_template(agreed.metadata, items, self.known, indexed=index is not None)
        agreed.index = index
        agreed.complete = self._digests()

    def uncovered(self) -> list[tuple[str, str]]:
        """Return the first tensors of which the ranks do not hold all, with the reasons: see `uncovered`."""
        agreed = self.agreed
        if agreed is None or self.metadata.state_dict_metadata is not agreed.metadata.state_dict_metadata:
            return _first_uncovered(self.metadata)
        if agreed.uncovered is None:
            agreed.uncovered = _first_uncovered(self.metadata)
        return agreed.uncovered

    def results(self) -> list[list[WriteResult]]:
        """Return each rank's results as lists, decoded from columns where needed."""
        with without_gc():
            return [
                each if columns is None or self.agreed is None else results_of(self.agreed.plans[rank].items, columns)
                for rank, (each, columns) in enumerate(zip(self.sent, self.columns, strict=True))
            ]

    def index(self, bucketpoint: dict[str, Any], storage_meta: StorageMeta, version: tuple[str, ...]) -> bytes | None:
        """Return the index filled from the template; None if there is no template for these layouts."""
        agreed = self.agreed
        if agreed is None or agreed.index is None or self._digests() != agreed.complete:
            return None
        return agreed.index.fill(
            b"".join(each.checksums for each in self.known),
            [path for each in self.known for path, _, _ in each.objects],
            bucketpoint=bucketpoint,
            storage_meta=storage_meta,
            version=version,
        )

    def filled(self, end: dict[str, Any], index: IndexRef | None = None) -> bytes | None:
        """Return the metadata filled from the template, with `end` as its last attributes; None without a template."""
        agreed = self.agreed
        if agreed is None or agreed.template is None or self._digests() != agreed.complete:
            return None
        return agreed.template.fill(self.known, end, index)

    def _plan_without_templates(self) -> CachedPlan | None:
        """Return the cached plan if all ranks sent columns and it has no templates for their layouts."""
        digests = self._digests()
        return self.agreed if digests is not None and self.agreed and digests != self.agreed.complete else None

    def _digests(self) -> tuple[bytes, ...] | None:
        """Return the digests of all ranks' layouts; None if a rank sent no columns, or the metadata was altered."""
        if self.agreed is None or len(self.known) < len(self.columns):
            return None
        planned = self.agreed.metadata
        if self.metadata.state_dict_metadata is not planned.state_dict_metadata:
            return None
        if self.metadata.planner_data is not planned.planner_data:
            return None
        return tuple([columns.layout.digest for columns in self.known])


def _first_uncovered(metadata: Metadata) -> list[tuple[str, str]]:
    return list(itertools.islice(uncovered(metadata, {}), _NAMED_AT_MOST))


def reported(results: Sequence[Any], metadata: Metadata) -> RankResults:
    """Join the ranks' reports with the facts that the coordinator knew. New layouts are kept for the next save.

    Raises:
        IncompleteSaveError: a rank's results do not fit the items that it was assigned.
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
                "The cached plan does not belong to the metadata that was passed with it",
                remedy="A planner that alters the metadata of SavePlanner must use dataclasses.replace",
            )
        try:
            columns_of_rank = each.columns(len(agreed.plans[rank].items), metadata.known[rank])
        except BucketpointError as error:
            error.rank = agreed.senders[rank]
            raise
        agreed.layouts[rank] = columns_of_rank.layout
        columns.append(columns_of_rank)
    return RankResults(results, metadata, agreed, tuple(columns))
