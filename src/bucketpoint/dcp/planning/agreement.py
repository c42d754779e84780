"""Checks that the ranks of a save or a load agree. The error names the ranks that differ.

Each rank sends a statement with its plan, so that disagreement is found before any data is uploaded. It sends the
statement again with its results, because DCP's planner does not send cached plans, and drops data added to plans.
"""

from __future__ import annotations

import hashlib
import itertools
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from torch.distributed.checkpoint import LoadPlan, Metadata, SavePlan, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from bucketpoint.dcp.planning.items import assigned_items, unpack_mappings
from bucketpoint.dcp.planning.nested_state import Path, integers_of, merged_int_keys
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
        place: digest of the store (with its endpoint) and of the key prefix.
        options: digest of the options that decide the layout of objects.
        world: number of ranks in the job.
        end: for error messages, the last characters of the URL, and the endpoint if it is not the service's default.
        rank: global rank.
        version: version of bucketpoint; empty if the rank has 0.2.
        created: monotonic time at which this process made or received the statement.
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
    """Make the statement of this rank. `options`: a value whose `repr` is equal for equal options."""
    place, end = _place(store, prefix, url)
    return Statement(place, _digest(options, 4), world, end, rank, __version__)


def _place(store: Store, prefix: str, url: str) -> tuple[bytes, str]:
    """Return a digest of store and prefix, and the end of the URL for error messages."""
    # The identity of a local folder is its inode, which exists only after the first write.
    identity = store.url if isinstance(store, LocalStore) else store.identity
    # Show the absolute URL of a local folder, since ranks may resolve the same relative path differently.
    shown = clean(store.url if isinstance(store, LocalStore) else url)
    end = shown if len(shown) <= _END_CHARS else f"…{shown[-_END_CHARS:]}"
    if identity != store.url:
        end = f"{end} at {urlsplit(identity).netloc[:_HOST_CHARS]}"
    return _digest((identity, prefix), 8), end


def _digest(value: object, size: int) -> bytes:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=size).digest()


def agree_on_plans(plans: Sequence[SavePlan], url: str | None, *, since: float) -> list[SavePlan]:
    """Return the plans without statements; raise RanksDisagreeError if the ranks' statements or tensors differ.

    Args:
        since: monotonic time at which the save began. Older statements are ignored: they are in plans that a planner
            has cached.
    """
    statements = [plan.storage_data for plan in plans]
    agree([each if isinstance(each, Statement) and each.created >= since else None for each in statements], url)
    # Skip plans of our planner: it has compared the tensors already, and access would decode its lazy items.
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
    """Raise RanksDisagreeError with the ranks grouped by value, the largest group first. `stated`: values and texts."""
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


def rank_of(place: int, stated: object) -> int:
    """Return the global rank in a plan's statement; without a statement `place`, the rank in the group."""
    return stated.rank if isinstance(stated, Statement | CommitRead) else place


def _by_rank(values: Sequence[_T], stated: Sequence[object]) -> dict[int, _T]:
    """Return values by stated global rank; by position if two ranks state the same number, so that no value is lost."""
    ranks = list(itertools.starmap(rank_of, enumerate(stated)))
    return dict(zip(ranks if len({*ranks}) == len(ranks) else range(len(ranks)), values, strict=True))


# -- loads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommitRead:
    """Statement of a rank in a load: the commit whose metadata the rank has read.

    Attributes:
        commit: id of the commit, equal on exactly the ranks that have read the same commit.
        shown: for error messages, the end of the URL and of the id.
        rank: global rank.
    """

    commit: str
    shown: str
    rank: int = field(default=0, compare=False)


def commit_read(token: str | None, data: bytes, store: Store, prefix: str, url: str) -> CommitRead:
    """Make the statement of this rank. The id of the commit is `token`, or else a digest of store, prefix and `data`.

    Each save of `BucketWriter` has a unique token, which copies of it may keep. Other writers store no token,
    and the metadata of two of their saves may be equal, so the digest includes store and prefix.
    """
    place, end = _place(store, prefix, url)
    commit = token or f"{place.hex()}-{hashlib.blake2b(data, digest_size=8).hexdigest()}"
    return CommitRead(commit, f"{end!r} (commit {commit[-_COMMIT_CHARS:]})", this_rank())


def agree_on_commit(plans: Sequence[LoadPlan], url: str | None) -> list[LoadPlan]:
    """Return the plans without statements; raise RanksDisagreeError if the ranks have read different commits."""
    refuse_saves(plans, url)
    stated = [plan.storage_data for plan in plans]
    refuse_two_commits(_by_rank(stated, stated), url)
    return [replace(plan, storage_data=None) if isinstance(plan.storage_data, CommitRead) else plan for plan in plans]


def refuse_saves(plans: Sequence[LoadPlan | SavePlan], url: str | None) -> None:
    """Raise RanksDisagreeError if a rank of a load has sent the plan of a save."""
    saving = [rank_of(place, plan.storage_data) for place, plan in enumerate(plans) if isinstance(plan, SavePlan)]
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
    """Raise RanksDisagreeError if ranks differ on a tensor's or chunk's dtype or shape: bytes would be misread."""
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
    """Raise an error that lists each rank's part of a tensor, or of one chunk if only the size of the chunk differs."""
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


# -- structures -------------------------------------------------------------------------------------------------------


def merged_mappings(plans: Sequence[SavePlan], metadata: Metadata) -> dict[str, Path]:
    """Merge the mappings of the ranks' `SavePlanner`s from flat names to paths.

    Raises:
        RanksDisagreeError: a load that builds the state from the merged mappings would refuse a tensor or a dict, or
            change a rank's structure.
    """
    every = _by_rank([plan.planner_data for plan in plans], [plan.storage_data for plan in plans])
    parts = unpack_mappings([local.mappings for local in every.values()])
    whole: dict[str, Path] = {}
    # The dicts and lists: for each one the type of the keys, and the first path through it.
    nodes: dict[Path, tuple[type, Path]] = {}
    for part in parts.values():
        for name, path in part.items():
            if whole.setdefault(name, path) != path:
                _refuse_paths(every, parts, whole[name], path)
            for depth in range(len(path) - 1, -1, -1):
                kind, first = nodes.setdefault(path[:depth], (type(path[depth]), path))
                if kind is not type(path[depth]):
                    _refuse_paths(every, parts, first, path)
                if first is not path:
                    break
    for name, path in whole.items():
        # Ranks without a dict or list may have None or an empty list at its place, which give way in a load.
        if path in nodes and isinstance(metadata.state_dict_metadata.get(name), TensorStorageMetadata):
            _refuse_paths(every, parts, path, nodes[path][1])
    _agree_on_int_keys(every, parts)
    return whole


def _agree_on_int_keys(every: Mapping[int, Any], parts: Mapping[bytes, Mapping[str, Path]]) -> None:
    """Raise RanksDisagreeError if the merged record of integer keys makes an integer of a rank's text key."""
    merged = merged_int_keys({record for local in every.values() for record in local.int_keys})
    if not merged:
        return
    depths = {len(node) for node in merged}
    keys_in: dict[bytes, dict[Path, set[str]]] = {blob: defaultdict(set) for blob in parts}
    for blob, part in parts.items():
        for path in part.values():
            for depth in depths:
                if depth < len(path) and path[:depth] in merged:
                    keys_in[blob][path[:depth]].add(str(path[depth]))
    for (mappings, int_keys), alike in groupby(every, lambda rank: (every[rank].mappings, every[rank].int_keys)):
        rank, own = next(alike), merged_int_keys(int_keys)
        for node, keys in itertools.chain.from_iterable(keys_in[blob].items() for blob in mappings):
            listed = own.get(node, set())
            if listed == merged[node] or not (texts := integers_of(keys, merged[node]) - integers_of(keys, listed)):
                continue
            text = min(texts)
            other = next(
                each for each in every if integers_of([text], merged_int_keys(every[each].int_keys).get(node, ()))
            )
            stated = {other: (int, "integers as keys"), rank: (str, f"the text {text!r} as a key")}
            _refuse_structures(stated, (*node, text))


def _refuse_paths(every: Mapping[int, Any], parts: Mapping[bytes, Mapping[str, Path]], *paths: Path) -> NoReturn:
    stated = {
        rank: (path, "state" + "".join(f"[{key!r}]" for key in path))
        for rank, local in every.items()
        for path in paths
        if any(parts[blob].get(".".join(map(str, path))) == path for blob in local.mappings)
    }
    _refuse_structures(stated, min(paths, key=len))


def _refuse_structures(stated: Mapping[int, tuple[Any, str]], path: Path) -> NoReturn:
    _refuse(
        "The ranks' states have different structures at one key",
        stated,
        None,
        "Give the key a value, a list or a dict on all ranks, and a dict keys of one type; or use different keys",
        key=".".join(map(str, path)),
    )


def descriptions(items: Iterable[WriteItem]) -> bytes:
    """Return for each item a 4-byte checksum of the dtype and the shapes that the writing rank has."""
    every = [item.tensor_data for item in items]
    checksums = [
        _NO_TENSOR if data is None else _checksum(data.properties.dtype, data.size, data.chunk.sizes) for data in every
    ]
    return array("I", checksums).tobytes()


def _checksum(dtype: object, size: Iterable[int], chunk: Iterable[int]) -> int:
    return zlib.crc32(f"{dtype}{tuple(size)}{tuple(chunk)}".encode())


def reports_of(results: Sequence[Any]) -> dict[int, object]:
    """Return the `report` that each rank sent with its results, by global rank."""
    statements = [getattr(each, "statement", None) for each in results]
    return _by_rank([getattr(each, "report", None) for each in results], statements)


def agree_on_results(results: Sequence[Any], metadata: Metadata, url: str | None) -> None:
    """Raise RanksDisagreeError if results belong to different saves, or dtypes or shapes differ from the metadata."""
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
                    rank=rank_of(place, statements[place]),
                    remedy="Use a planner that alters no dtype or shape of the metadata, and use each planner for the "
                    "same saves on all ranks of one process group",
                )
