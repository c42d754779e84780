"""Global plan of a save with its metadata, and a cache of the plans of earlier saves.

If columns can hold all items, the plan is computed on columns. Otherwise DCP's functions make it, with no load balance.
"""

from __future__ import annotations

import copy
import dataclasses
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import StorageMeta

from bucketpoint.dcp.planning.agreement import agree_on_tensors
from bucketpoint.dcp.planning.assign import Assignment, assign_items
from bucketpoint.dcp.planning.items import AssignedItems, PlanItems, Table, packed_items, unpack_table
from bucketpoint.dcp.planning.nested_state import IntKeys
from bucketpoint.errors import BucketpointError
from bucketpoint.format.metadata.coverage import MAX_CUT_AXES, uncovered
from bucketpoint.format.metadata.template import MetadataTemplate
from bucketpoint.format.storage_info import ItemColumns

if TYPE_CHECKING:
    from bucketpoint.format.index.encode import IndexTemplate

KEPT_PLANS = 4
"""Limit on the plans in a cache: enough for two models and two optimizers that are saved separately."""

KEPT_CACHES = 8

_Key = TypeVar("_Key")
_Plan = TypeVar("_Plan")


@dataclass(frozen=True)
class Templates:
    """Templates of metadata and index, for saves with the same layout of items.

    Attributes:
        layouts: positions of each rank's items.
        indexed: an index was requested.
        metadata, index: None if columns cannot hold their content.
    """

    layouts: tuple[ItemColumns, ...]
    indexed: bool
    metadata: MetadataTemplate | None
    index: IndexTemplate | None


@dataclass
class GlobalPlan:
    """Plan of the coordinator for all ranks.

    Attributes:
        assignment: the assignment as columns; None if DCP's functions have made the plan.
        int_keys: paths of dicts with integer keys, on any rank.
        uncovered: tensors that the ranks do not hold completely, with the reasons: see `coverage.uncovered`.
        shapes: size and number of chunks of each tensor, by which later changes to the metadata are detected.
    """

    items: Sequence[AssignedItems] | Sequence[list[Any]]
    metadata: Metadata
    assignment: Assignment | None
    uncovered: Sequence[tuple[str, str]]
    int_keys: Sequence[IntKeys] = ()
    templates: Templates | None = None
    shapes: Sequence[tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = shapes_of(self.metadata)

    def lists(self) -> list[Any]:
        return [PlanItems(columns=each) if isinstance(each, AssignedItems) else list(each) for each in self.items]


class PlanCache:
    """Plans of earlier saves; the most recently used plan is the last.

    Attributes:
        kept: the items that this rank holds, and the items that it was assigned last (decoded, which takes
            2.5 microseconds an item), by the signature of the state.
        agreed: on the coordinator, the plans of all ranks, by a digest of everything that the ranks sent.
        warned: names that a warning has named.
    """

    def __init__(self, identity: str | None = None) -> None:
        self.identity = identity or uuid.uuid4().hex
        self.kept: dict[Hashable, tuple[PlanItems, PlanItems]] = {}
        self.agreed: dict[bytes, GlobalPlan] = {}
        self.warned: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        # A checkpoint process unpickles new planners and writers for each save; by the identity they find their cache.
        return _cache_of, (self.identity,)


def with_last(plans: Mapping[_Key, _Plan], key: _Key, plan: _Plan, most: int = KEPT_PLANS) -> dict[_Key, _Plan]:
    """Return the newest `most` plans, or other values, the last of which is this one."""
    others = [each for each in plans.items() if each[0] != key]
    return dict([*others, (key, plan)][-most:])


_caches: dict[str, PlanCache] = {}
"""By identity, the caches of planners and writers that were unpickled in this process."""


def _cache_of(identity: str) -> PlanCache:
    cache = _caches.pop(identity, None) or PlanCache(identity)
    _caches[identity] = cache
    for old in list(_caches)[:-KEPT_CACHES]:
        _caches.pop(old, None)
    return cache


def unpack_tables(plans: Sequence[SavePlan]) -> dict[bytes, Table]:
    """Return the decoded tables of all ranks, keyed by their encoded bytes. Equal bytes are decoded once."""
    every = [packed_items(plan.items) for plan in plans]
    blobs = dict.fromkeys(blob for packed in every if packed is not None for blob in packed.tables)
    return {blob: unpack_table(blob) for blob in blobs}


def plan_globally(
    plans: Sequence[SavePlan],
    tables: Mapping[bytes, Table],
    nodes: Sequence[object],
    apart: Sequence[str] = (),
) -> GlobalPlan:
    """Assign the items of all ranks to ranks. `nodes` and `apart` as in `assign_items`.

    Raises:
        BucketpointError: the ranks' chunks overlap, or do not cover their tensors.
        RanksDisagreeError: ranks hold different tensors under one name.
    """
    packed = [each for each in (packed_items(plan.items) for plan in plans) if each is not None]
    assignment = assign_items(packed, tables, nodes, apart) if len(packed) == len(plans) else None
    if assignment is None:
        return _plan_of_dcp(plans, frozenset(apart))
    state = assignment.metadata.state_dict_metadata
    lacking = list(uncovered(assignment.metadata, {}))
    # DCP's check is slow for many chunks, so it gets only the tensors that may fail.
    doubtful = {name for name, _ in lacking}
    doubtful |= {name for name, entry in state.items() if len(getattr(entry, "size", ())) > MAX_CUT_AXES}
    _validate(plans, Metadata({name: state[name] for name in doubtful}))
    items = [AssignedItems(assignment.encode(rank), asked) for rank, asked in enumerate(packed)]
    return GlobalPlan(items, assignment.metadata, assignment, lacking)


def _plan_of_dcp(plans: Sequence[SavePlan], apart: frozenset[str]) -> GlobalPlan:
    agree_on_tensors(plans)
    taken: set[Any] = set()
    held = []
    for plan in plans:
        # For names in `apart`, the first rank that holds an item keeps it.
        own = [item for item in plan.items if item.index.fqn not in apart or item.index not in taken]
        taken.update(item.index for item in own)
        held.append(replace(plan, items=own))
    assigned, metadata = create_default_global_save_plan(dedup_save_plans(held))
    _validate(assigned, metadata)
    return GlobalPlan([plan.items for plan in assigned], metadata, None, list(uncovered(metadata, {})))


def shapes_of(metadata: Metadata) -> list[tuple[Any, ...]]:
    """Return the name, size and number of chunks of each entry."""
    entries = metadata.state_dict_metadata.items()
    return [(name, getattr(entry, "size", None), len(getattr(entry, "chunks", ()))) for name, entry in entries]


def _validate(plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Run DCP's own check: chunks lie within their tensors, do not overlap, and fill them."""
    # The check returns a bool up to torch 2.11, and a list of faults in later versions.
    faults: Any = _validate_global_plan(list(plans), metadata)
    if faults is not True and faults != []:
        why = "; ".join(faults)[:500] if isinstance(faults, list) else "see the log of DCP for the tensor"
        raise BucketpointError(f"The chunks of the ranks overlap, or do not cover the whole tensor: {why}")


# -- metadata ---------------------------------------------------------------------------------------------------------

# At the end of a save, DCP sends the planner's metadata object to every rank. This would be the largest message of a
# save, and no rank needs it, so a stub with the URL is sent instead.

_STOCK_FIELDS = tuple(field.name for field in dataclasses.fields(Metadata))


@dataclass
class WriterMeta(StorageMeta):
    """Storage metadata by which our planner recognises our writer, the only writer that handles `PlannedMetadata`."""


def _saved(url: str | None, committed: Any) -> str:
    """Return a short `repr` of a save, because the whole metadata would fill a page of a notebook."""
    return f"Saved({url}{f', {committed[0] / 1e6:.1f} MB, {committed[3]:.1f} s' if committed else ''})"


@dataclass(repr=False)
class PlannedMetadata(Metadata):
    """Metadata that our planner makes and our writer commits.

    Pickled as stock `Metadata`, or as a small `RemoteMetadata` once `committed_at` is set.

    Attributes:
        url: URL of the checkpoint, once it is committed.
        committed_at: the same URL, if other ranks are to get a `RemoteMetadata`.
        committed: bytes, step and metrics of the committed checkpoint, and seconds of the save: a plain tuple, because
            its pickle is short.
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
            # A checkpoint process returns these figures to the handle in the training process.
            attributes["committed"] = self.committed
        return Metadata, (self.state_dict_metadata,), attributes

    def __copy__(self) -> PlannedMetadata:
        return dataclasses.replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Metadata:
        # Without this method, a deep copy could be the stub that is pickled.
        return copy.deepcopy(stock(self), memo)


def stock(metadata: Metadata) -> Metadata:
    """Return a shallow copy as DCP's class `Metadata`, with DCP's fields only."""
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


def _elsewhere(self: RemoteMetadata) -> NoReturn:
    raise BucketpointError(
        "The metadata of the save is available only on the rank that committed it",
        url=self.url,
        remedy="On other ranks, read it with BucketReader(url).read_metadata()",
    )


for _name in _STOCK_FIELDS:
    setattr(RemoteMetadata, _name, property(_elsewhere))
