"""Coverage of a checkpoint: whether it holds all of its tensors, or only parts of them."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PARTIAL = "partial"
"""Fact of a checkpoint that one rank saved alone (`no_dist`): it holds only a part of its tensors, on purpose."""

RANK = re.compile(r"\.rank-(0|[1-9][0-9]{0,8})(?:\.|$)")
"""The part of a flat name by which `rank_state` distinguishes the ranks' values."""

MAX_CUT_AXES = 5
"""Axes along which a tensor may be cut for the search for overlaps: each doubles the work for a chunk."""

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk."""


def uncovered(metadata: Any, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each tensor that the checkpoint holds only in part, with the reason. The caller may stop at the first.

    A commit, `verify`, a prune and a restore all ask this function: a checkpoint that does not cover its own tensors is
    damaged. It covers a tensor if the chunks do not overlap and their volumes add up to that of the tensor. A
    checkpoint that one rank saved alone (`no_dist`) is marked so, and counts as covered.

    Args:
        metadata: in DCP's classes, in plain ones, or made of an index.
        facts: that bucketpoint wrote beside DCP's fields.
    """
    if facts.get(PARTIAL):
        return
    for name, size, boxes in _cut_tensors(metadata.state_dict_metadata):
        fault = _fault(size, boxes)
        if fault is not None:
            yield name, fault


def is_tensor(entry: Any) -> bool:
    """Return True if an entry of the state's metadata is a tensor's."""
    return "chunks" in getattr(type(entry), "__dataclass_fields__", ())


def lacking_ranks(names: Iterable[str], ranks: int) -> Iterator[tuple[str, str]]:
    """Yield each name under which fewer than `ranks` ranks have a value by `rank_state`, with the number."""
    saved: dict[str, set[str]] = defaultdict(set)
    for match in filter(None, map(RANK.search, names)):
        saved[match.string[: match.start()]].add(match[1])
    for name, values in saved.items():
        if len(values) < ranks:
            yield name, f"has the values of {len(values)} of {ranks} ranks"


def _cut_tensors(entries: Any) -> Iterator[tuple[str, Sequence[int], list[Box]]]:
    """Yield name, shape and chunks of each tensor that is not one chunk of its own shape."""
    if not isinstance(entries, dict):
        # An index finds them without an object for each entry.
        yield from entries.cut_tensors()
        return
    for name, entry in entries.items():
        if not is_tensor(entry):
            continue
        chunks, size = entry.chunks, entry.size
        if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(size):
            yield name, size, [(chunk.offsets, chunk.sizes) for chunk in chunks]


def _fault(size: Sequence[int], chunks: Sequence[Box]) -> str | None:
    """Describe what the chunks of a tensor lack; None if they cover it."""
    volume = math.prod(size)
    # Empty chunks come from ranks without a part.
    boxes = [(offsets, sizes) for offsets, sizes in chunks if 0 not in sizes]
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if not volume:
        return None
    if held < volume:
        return f"has only {held} of its {volume} elements"
    cut = [axis for axis, whole in enumerate(size) if any(sizes[axis] != whole for _, sizes in boxes)]
    if held > volume or (len(cut) <= MAX_CUT_AXES and _overlap(size, boxes, cut)):
        return f"has chunks that overlap, with {held} elements in all for its {volume}"
    return None


def _overlap(size: Sequence[int], boxes: Iterable[Box], cut: Sequence[int]) -> bool:
    """Return True if boxes overlap whose volumes add up to that of the whole.

    Boxes that fill the whole share each corner with another one, but for the whole's own corners. Conversely, boxes of
    which that is true cover each point an odd number of times: once, as their volumes add up to no more.
    """
    odd = set(itertools.product(*((0, size[axis]) for axis in cut)))
    for offsets, sizes in boxes:
        for corner in itertools.product(*((offsets[axis], offsets[axis] + sizes[axis]) for axis in cut)):
            if corner in odd:
                odd.remove(corner)
            else:
                odd.add(corner)
    return bool(odd)
