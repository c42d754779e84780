"""Check that the ranks of a save or a load agree; the error names those that differ.

A rank sends its statement with its plan, so that ranks which differ raise before any data is sent. It sends the
statement again with its results: cached plans are not sent, and DCP's planner drops what is added to a plan.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from torch.distributed.checkpoint import LoadPlan, Metadata, SavePlan, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from bucketpoint.dcp.planning.items import assigned_items
from bucketpoint.dcp.process_groups import this_rank
from bucketpoint.errors import RanksDisagreeError, first_of
from bucketpoint.stores import LocalStore, Store
from bucketpoint.stores.redact import clean
from bucketpoint.version import __version__

_T = TypeVar("_T")

_END_CHARS = 32
_HOST_CHARS = 24
_COMMIT_CHARS = 16
_NAMED_AT_MOST = 6

_NO_TENSOR = 0


@dataclass(frozen=True)
class Statement:
    """One rank's view of the save: destination, options, number of ranks, and version of bucketpoint.

    Attributes:
        place: digest of the store, with its endpoint, and of the key prefix in it.
        options: digest of the options that shape the objects.
        world: number of ranks in the job.
        end: the last characters of the URL, and the endpoint if it is not the service's own; for messages.
        rank: number of the rank in the job.
        version: version of bucketpoint; empty from ranks with 0.2.
        created: time of this process's monotonic clock at which the statement was made or received here.
    """

    place: bytes
    options: bytes
    world: int
    end: str
    rank: int = field(compare=False)
    version: str = ""
    created: float = field(default_factory=time.monotonic, compare=False)

    @property
    def fields(self) -> tuple[bytes, bytes, int, str, int, str]:
        """The values that are sent to the coordinator."""
        return self.place, self.options, self.world, self.end, self.rank, self.version

    def __reduce__(self) -> tuple[Any, ...]:
        return Statement, self.fields


def make_statement(store: Store, prefix: str, url: str, *, options: object, world: int, rank: int) -> Statement:
    """Make the statement of this rank. `options` is any value with equal `repr` for equal options."""
    place, end = _place(store, prefix, url)
    return Statement(place, _digest(options, 4), world, end, rank, __version__)


def _place(store: Store, prefix: str, url: str) -> tuple[bytes, str]:
    """Return a digest of the store and the prefix in it, and the end of the URL for messages."""
    # Not the identity of a local folder: it is the inode's, which exists only after a write.
    identity = store.url if isinstance(store, LocalStore) else store.identity
    # For a local folder the absolute URL: the same relative path may lead to different places.
    shown = clean(store.url if isinstance(store, LocalStore) else url)
    end = shown if len(shown) <= _END_CHARS else f"…{shown[-_END_CHARS:]}"
    if identity != store.url:
        end = f"{end} at {urlsplit(identity).netloc[:_HOST_CHARS]}"
    return _digest((identity, prefix), 8), end


def _digest(value: object, size: int) -> bytes:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=size).digest()


def agree_on_plans(plans: Sequence[SavePlan], url: str | None, *, since: float) -> list[SavePlan]:
    """Raise if the statements on the ranks' plans differ, or the tensors in them. Return the plans without statements.

    Args:
        since: when this save began. A planner that keeps plans also keeps the statements of earlier saves on them;
            those are ignored.
    """
    statements = [plan.storage_data for plan in plans]
    agree([each if isinstance(each, Statement) and each.created >= since else None for each in statements], url)
    # Plans of our planner are skipped: it has compared the tensors, and reading its lazy items would create them.
    agree_on_tensors([SavePlan([]) if assigned_items(plan.items) is not None else plan for plan in plans], url)
    return [replace(plan, storage_data=None) if isinstance(plan.storage_data, Statement) else plan for plan in plans]


def agree(statements: Sequence[Statement | None], url: str | None) -> None:
    """Raise RanksDisagreeError if the statements of the ranks differ. A rank without a statement (None) is skipped."""
    if len({each for each in statements if each is not None}) < 2:
        return
    heard = {rank: each for rank, each in _by_rank(statements, statements).items() if each is not None}
    same_url = "Make the URL on one rank and broadcast it, because a time or a random name differs on each rank"
    same_arguments = "Make the writer with the same arguments on all ranks"
    alike = len({each.end for each in heard.values()}) < len({each.place for each in heard.values()})
    places = {
        rank: (each.place, f"{each.end!r} (digest {each.place.hex()})" if alike else repr(each.end))
        for rank, each in heard.items()
    }
    worlds = {rank: (each.world, f"{each.world} ranks") for rank, each in heard.items()}
    options = {rank: (each.options, f"options {each.options.hex()}") for rank, each in heard.items()}
    versions = {rank: (each.version, each.version or "0.2 or older") for rank, each in heard.items()}
    for message, stated, remedy in (
        ("The ranks have different versions of bucketpoint", versions, "Install one version for all ranks"),
        ("The ranks save to different places", places, same_url),
        ("The ranks see different world sizes", worlds, same_arguments),
        (
            "The writers of the ranks have different options (groups, target_object_bytes or _extensions)",
            options,
            same_arguments,
        ),
    ):
        if len({value for value, _ in stated.values()}) > 1:
            _refuse(message, stated, url, remedy)


def _refuse(
    message: str, stated: Mapping[int, tuple[Any, str]], url: str | None, remedy: str, key: str | None = None
) -> NoReturn:
    """Raise the error for ranks that differ. It lists the ranks that stated the same, the largest group first.

    Args:
        stated: for each rank, a value to compare and its text.
    """
    groups: dict[Any, tuple[list[int], str]] = {}
    for rank, (value, words) in sorted(stated.items()):
        groups.setdefault(value, ([], words))[0].append(rank)
    largest_first = sorted(groups.values(), key=lambda group: -len(group[0]))
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {first_of(ranks, _NAMED_AT_MOST)}: {words}" for ranks, words in largest_first
    ]
    listed = first_of(parts, _NAMED_AT_MOST, "; ", "; ")
    blamed = min((rank for ranks, _ in largest_first[1:] for rank in ranks), default=None)
    raise RanksDisagreeError(f"{message}: {listed}", url=url, key=key, rank=blamed, remedy=remedy)


def rank_of(place: int, plan: SavePlan | LoadPlan) -> int:
    """Return the job's number of the rank that sent a plan, or its place in the group if the plan has none."""
    return _rank_of(place, plan.storage_data)


def _rank_of(place: int, stated: object) -> int:
    return stated.rank if isinstance(stated, Statement | CommitRead) else place


def _by_rank(values: Sequence[_T], stated: Sequence[object]) -> dict[int, _T]:
    """Return values by the stated numbers of their ranks, or by position if two are equal, so that none is lost."""
    ranks = list(itertools.starmap(_rank_of, enumerate(stated)))
    return dict(zip(ranks if len({*ranks}) == len(ranks) else range(len(ranks)), values, strict=True))


# -- loads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommitRead:
    """The commit whose metadata a rank of a load has read.

    Attributes:
        commit: a value that is equal on exactly the ranks that read one commit.
        shown: the end of the URL, and the commit, for messages.
        rank: number of the rank in the job.
    """

    commit: str
    shown: str
    rank: int = field(default=0, compare=False)


def commit_read(token: str | None, data: bytes, store: Store, prefix: str, url: str) -> CommitRead:
    """Make the statement of this rank on metadata of a save with a token, or else with the bytes `data`.

    A save of `BucketWriter` has a token that no other save has, wherever its objects were copied. Metadata of another
    writer may be the same in two saves, so there the place counts too.
    """
    place, end = _place(store, prefix, url)
    commit = token or f"{place.hex()}-{hashlib.blake2b(data, digest_size=8).hexdigest()}"
    return CommitRead(commit, f"{end!r} (commit {commit[-_COMMIT_CHARS:]})", this_rank())


def agree_on_commit(plans: Sequence[LoadPlan], url: str | None) -> list[LoadPlan]:
    """Raise if the ranks have read different commits. Return the plans without statements."""
    refuse_saves(plans, url)
    stated = [plan.storage_data for plan in plans]
    refuse_two_commits(_by_rank(stated, stated), url)
    return [replace(plan, storage_data=None) if isinstance(plan.storage_data, CommitRead) else plan for plan in plans]


def refuse_saves(plans: Sequence[LoadPlan | SavePlan], url: str | None) -> None:
    """Raise RanksDisagreeError if a rank takes part in a load with the plan of a save."""
    saving = [rank_of(place, plan) for place, plan in enumerate(plans) if isinstance(plan, SavePlan)]
    if saving:
        raise RanksDisagreeError(
            f"A save and a load use one process group at the same time: rank {first_of(saving, _NAMED_AT_MOST)} saves",
            url=url,
            rank=saving[0],
            remedy="Make each call on all ranks, in the same order",
        )


def refuse_two_commits(statements: Mapping[int, Any], url: str | None) -> None:
    """Raise RanksDisagreeError if the ranks have read different commits. Ranks without a statement are skipped."""
    stated = {rank: (each.commit, each.shown) for rank, each in statements.items() if isinstance(each, CommitRead)}
    if len({commit for commit, _ in stated.values()}) > 1:
        _refuse(
            "The ranks load different checkpoints",
            stated,
            url,
            "Ask for the newest checkpoint on one rank and broadcast its URL; if all ranks have named one URL, another "
            "job saved there during the load: load again",
        )


# -- tensors ----------------------------------------------------------------------------------------------------------


def agree_on_tensors(plans: Sequence[SavePlan], url: str | None = None) -> None:
    """Raise if ranks describe one tensor, or one chunk of it, differently: the bytes of one rank would be misread."""
    tensors: dict[str, Any] = {}
    chunks: dict[MetadataIndex, Any] = {}
    for plan in plans:
        for item in plan.items:
            whole, chunk = _description(item.tensor_data)
            if tensors.setdefault(item.index.fqn, whole) != whole or chunks.setdefault(item.index, chunk) != chunk:
                _refuse_tensor(plans, item, url)


def _description(data: TensorWriteData | None) -> tuple[Any, Any]:
    return ((data.properties.dtype, data.properties.layout, data.size), data.chunk.sizes) if data else (None, None)


def _refuse_tensor(plans: Sequence[SavePlan], item: WriteItem, url: str | None) -> None:
    """Raise an error that lists what each rank holds of a tensor, or of one chunk if only its size differs."""
    name = item.index.fqn
    held = {
        rank: [each for each in plan.items if each.index.fqn == name]
        for rank, plan in _by_rank(plans, [plan.storage_data for plan in plans]).items()
        if plan.items
    }
    if len({_description(each.tensor_data)[0] for items in held.values() for each in items}) == 1:
        held = {rank: [each for each in items if each.index == item.index] for rank, items in held.items()}
    stated = {rank: (words, words) for rank, items in held.items() if items for words in [_in_words(items)]}
    _refuse(
        "The ranks hold different tensors under one name",
        stated,
        url,
        "Give the tensor the same dtype and shape on all ranks, or a different name on each rank",
        key=name,
    )


def _in_words(items: Iterable[WriteItem]) -> str:
    words = []
    for data in [item.tensor_data for item in items]:
        if data is None:
            words.append("an object")
            continue
        (dtype, layout, size), chunk = _description(data)
        strided = "" if str(layout) == "torch.strided" else f" {layout}"
        part = "" if chunk == size else f", chunk {list(chunk)} at {list(data.chunk.offsets)}"
        words.append(f"{dtype}{strided} {list(size)}{part}".replace("torch.", ""))
    return " and ".join(dict.fromkeys(words))


def descriptions(items: Iterable[WriteItem]) -> bytes:
    """Return 4 bytes for each item: a checksum of dtype and shapes as the rank that writes the item sees them."""
    every = [item.tensor_data for item in items]
    checksums = [
        _NO_TENSOR if data is None else _checksum(data.properties.dtype, data.size, data.chunk.sizes) for data in every
    ]
    return array("I", checksums).tobytes()


def _checksum(dtype: object, size: Iterable[int], chunk: Iterable[int]) -> int:
    return zlib.crc32(f"{dtype}{tuple(size)}{tuple(chunk)}".encode())


def reports_of(results: Sequence[Any]) -> dict[int, object]:
    """Return what the ranks have reported of the save with their results, by their numbers in the job."""
    statements = [getattr(each, "statement", None) for each in results]
    return _by_rank([getattr(each, "report", None) for each in results], statements)


def agree_on_results(results: Sequence[Any], metadata: Metadata, url: str | None) -> None:
    """Raise if the ranks' results belong to different saves, or describe an item differently from the metadata."""
    statements = [getattr(each, "statement", None) for each in results]
    agree(statements, url)
    every: list[tuple[list[Any], bytes]] = [getattr(each, "named", ([], b"")) for each in results]
    if not any(described for _, described in every):
        return
    planned: dict[MetadataIndex, int] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            planned[MetadataIndex(name)] = _NO_TENSOR
            continue
        for chunk in entry.chunks:
            planned[MetadataIndex(name, chunk.offsets)] = _checksum(entry.properties.dtype, entry.size, chunk.sizes)
    for place, (named, described) in enumerate(every):
        for result, checksum in zip(named if described else (), array("I", described), strict=True):
            # Items that the metadata does not name are never read, so they are not checked.
            if planned.get(result.index, checksum) != checksum:
                raise RanksDisagreeError(
                    "A rank wrote a dtype or shape that the coordinator did not plan, so nothing was committed",
                    url=url,
                    key=result.index.fqn,
                    rank=_rank_of(place, statements[place]),
                    remedy="Use a planner that alters no dtype or shape of the metadata, and keeps plans in one "
                    "process group only, for the same saves on all ranks",
                )
