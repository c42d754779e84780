"""Coverage of a checkpoint: whether it holds all of its tensors, or only parts of them."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PARTIAL = "partial"
"""Name of the fact that one rank saved the checkpoint alone (`no_dist`): parts of tensors are missing on purpose."""

RANK = re.compile(r"\.rank-(0|[1-9][0-9]{0,8})(?:\.|$)")
"""Part of a flat name by which `rank_state` distinguishes the values of the ranks."""

MAX_CUT_AXES = 5
"""Limit on the axes along which a tensor is cut, for the search for overlaps. Each axis doubles the work per chunk."""

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk."""


def uncovered(metadata: Any, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each tensor that the chunks do not cover, with the reason.

    A tensor is covered if its chunks do not overlap and their volumes add up to that of the tensor. Commits, `verify`,
    prunes and restores treat a checkpoint with an uncovered tensor as damaged. A checkpoint that one rank saved alone
    (`no_dist`) has the fact `PARTIAL`, and no tensor of it is yielded.

    Args:
        metadata: metadata of DCP's classes or of the plain ones, or read from an index.
        facts: facts that bucketpoint wrote beside DCP's fields.
    """
    if facts.get(PARTIAL):
        return
    for name, size, boxes in _cut_tensors(metadata.state_dict_metadata):
        fault = _fault(size, boxes)
        if fault is not None:
            yield name, fault


def is_tensor(entry: Any) -> bool:
    """Return True if an entry of `state_dict_metadata` describes a tensor."""
    return "chunks" in getattr(type(entry), "__dataclass_fields__", ())


def lacking_ranks(names: Iterable[str], ranks: int) -> Iterator[tuple[str, str]]:
    """Yield each name under which fewer than `ranks` ranks saved a `rank_state`, with a description."""
    saved: dict[str, set[str]] = defaultdict(set)
    for match in filter(None, map(RANK.search, names)):
        saved[match.string[: match.start()]].add(match[1])
    for name, values in saved.items():
        if len(values) < ranks:
            yield name, f"has the values of {len(values)} of {ranks} ranks"


def _cut_tensors(entries: Any) -> Iterator[tuple[str, Sequence[int], list[Box]]]:
    """Yield name, shape and chunks of each tensor that is not one whole chunk."""
    if not isinstance(entries, dict):
        # An index finds these tensors without a Python object per entry.
        yield from entries.cut_tensors()
        return
    for name, entry in entries.items():
        if not is_tensor(entry):
            continue
        chunks, size = entry.chunks, entry.size
        if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(size):
            yield name, size, [(chunk.offsets, chunk.sizes) for chunk in chunks]


def _fault(size: Sequence[int], chunks: Sequence[Box]) -> str | None:
    """Describe why the chunks do not cover the tensor; None if they do."""
    volume = math.prod(size)
    # Empty chunks come from ranks without a part of the tensor.
    boxes = [(offsets, sizes) for offsets, sizes in chunks if 0 not in sizes]
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if not volume:
        return None
    if held < volume:
        return f"has only {held} of its {volume} elements"
    cut = [axis for axis, whole in enumerate(size) if any(sizes[axis] != whole for _, sizes in boxes)]
    if held > volume or (len(cut) <= MAX_CUT_AXES and _overlap(size, boxes, cut)):
        return f"has overlapping chunks, which have {held} elements in total for its {volume}"
    return None


def _overlap(size: Sequence[int], boxes: Iterable[Box], cut: Sequence[int]) -> bool:
    """Return True if the boxes overlap. Their volumes must add up to the volume of the tensor.

    Without overlap, each corner of the tensor is a corner of an odd number of boxes, and any other point is a corner of
    an even number. Conversely, boxes with this property cover each point of the tensor an odd number of times: exactly
    once, because their volumes allow no more.
    """
    odd = set(itertools.product(*((0, size[axis]) for axis in cut)))
    for offsets, sizes in boxes:
        for corner in itertools.product(*((offsets[axis], offsets[axis] + sizes[axis]) for axis in cut)):
            if corner in odd:
                odd.remove(corner)
            else:
                odd.add(corner)
    return bool(odd)
