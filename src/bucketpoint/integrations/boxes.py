"""Loads of boxes of saved tensors into the caller's tensors. Several loads read the same commit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import LoadPlan, Metadata

from bucketpoint.dcp.error_boundary import errors_of_dcp
from bucketpoint.dcp.planning.load_planner import LoadPlanner
from bucketpoint.dcp.planning.local_chunks import LocalChunks
from bucketpoint.dcp.process_groups import ranks_of
from bucketpoint.dcp.reader import BucketReader


@dataclass(frozen=True)
class SavedBox:
    """A box of a saved tensor, at `offsets` and of the shape of `target`, the tensor to read the box into."""

    key: str
    offsets: tuple[int, ...]
    target: torch.Tensor


class BoxReader(BucketReader):
    """Reader of boxes that reads the metadata only once, so that all its loads read the same commit.

    After another job has replaced or deleted the checkpoint, a load raises an error.
    """

    _first: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata at the first call, as `BucketReader` does, and return the same object at later calls."""
        if self._first is None:
            metadata: Metadata = super().read_metadata(*args, **kwargs)
            if self._commit is not None:
                self._first = metadata, self._commit
            return metadata
        self._in_load = False
        if self._cooperation is not None:
            self._cooperation.connect(self._url)
        self._commit = self._first[1]
        return cast(Metadata, self._first[0])

    def load(
        self,
        boxes: Iterable[SavedBox],
        metadata: Metadata,
        *,
        process_group: Any = None,
        alone: bool = False,
        failure: BaseException | None = None,
    ) -> None:
        """Read the boxes into their targets, in no defined order.

        Args:
            alone: make no collective call. Otherwise all ranks of the group call `load` together.
            failure: error of this rank, with which the load fails on all ranks before anything is read.
        """
        reader = self
        if alone:
            reader = copy.copy(self)
            reader._cooperation = None
        state, copies = _state_of(boxes, metadata)
        # Engines set a default device while they build a model, by a function mode. Without function modes the calls
        # below ignore that device, and are faster.
        with (
            torch._C.DisableTorchFunction(),
            errors_of_dcp(self.url, "The load", ranks_of(process_group) if not alone else ()),
        ):
            dcp.load(
                state,
                storage_reader=reader,
                planner=_BoxPlanner(failure),
                process_group=process_group,
                no_dist=alone,
            )
            # Targets may come from the inference mode, which also leaves out gradients.
            with torch.inference_mode():
                for target, source in copies:
                    target.copy_(source)


class _BoxPlanner(LoadPlanner):
    """Load planner for boxes, which accepts saved keys that are not loaded."""

    def __init__(self, failure: BaseException | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._failure = failure

    def create_local_plan(self) -> LoadPlan:
        if self._failure is not None:
            raise self._failure
        return super().create_local_plan()

    def _compare(self, plans: list[LoadPlan]) -> None:
        """Do nothing: boxes of a few keys are a complete load."""


def _state_of(
    boxes: Iterable[SavedBox], metadata: Metadata
) -> tuple[dict[str, LocalChunks], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the state to load into, and the copies to make after the load: a box is read once for each dtype."""
    read: dict[Any, torch.Tensor] = {}
    targets: dict[str, list[SavedBox]] = {}
    copies = []
    for box in boxes:
        source = read.setdefault((box.key, box.offsets, box.target.shape, box.target.dtype), box.target)
        if source is box.target:
            targets.setdefault(box.key, []).append(box)
        else:
            copies.append((box.target, source))
    entries: Mapping[str, Any] = metadata.state_dict_metadata
    return {key: _chunks(entries[key].size, own) for key, own in targets.items()}, copies


def _chunks(shape: Iterable[int], boxes: list[SavedBox]) -> LocalChunks:
    return LocalChunks(
        [box.target for box in boxes],
        tuple(shape),
        [box.offsets for box in boxes],
        [(0,) * len(box.offsets) for box in boxes],
        [tuple(box.target.shape) for box in boxes],
    )
