"""The order in which dataloaders of a `Trainer` give samples: repeated by a resumed run, on any number of ranks.

Lightning begins an interrupted epoch with the first batch again unless the dataloader has a state of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from bucketpoint.errors import BucketpointError


class ResumedSampler(Sampler[Any]):
    """A sampler that leaves out the first samples of its first epoch.

    Its length stays that of a whole epoch, by which Lightning counts batches.
    """

    def __init__(self, sampler: Any, leaves_out: int) -> None:
        self.sampler = sampler
        self._leaves_out = leaves_out

    def __iter__(self) -> Iterator[Any]:
        leaves_out, self._leaves_out = self._leaves_out, 0
        return itertools.islice(iter(self.sampler), leaves_out, None)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def with_repeatable_order(loader: Any) -> None:
    """Let a dataloader of one rank shuffle by seed and epoch, as Lightning's samplers for several ranks do.

    Otherwise the order comes from torch's generator, and no later run, on any number of ranks, finds it again.
    """
    batches = _batches_of(loader)
    sampler = None if batches is None else batches.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        batches.sampler = DistributedSampler(sampler.data_source, 1, 0, seed=seed)  # type: ignore[union-attr,arg-type]


def samples_in_a_batch(loader: Any) -> int | None:
    """Return how many samples all ranks together take from a dataloader at a time; None if that is not known."""
    batches = _batches_of(loader)
    if batches is None:
        return None
    sampler = batches.sampler.sampler if isinstance(batches.sampler, ResumedSampler) else batches.sampler
    return batches.batch_size * getattr(sampler, "num_replicas", 1)


def resume(loader: Any, samples: int, epoch: int) -> int:
    """Let a dataloader leave out samples that all ranks together have taken from the epoch. Return its batches so far.

    Raises:
        BucketpointError: the ranks now take another number of samples at a time, which does not divide those taken.
    """
    batches, at_a_time = _batches_of(loader), samples_in_a_batch(loader)
    assert batches is not None
    assert at_a_time is not None
    if samples % at_a_time:
        raise BucketpointError(
            f"The checkpoint was saved after {samples} samples of the epoch, and all ranks together now take "
            f"{at_a_time} at a time, so that no batch ends there",
            remedy="Choose batch size x ranks so that it divides the samples, for one as it was when the "
            "checkpoint was saved",
        )
    done = samples // at_a_time
    batches.sampler = ResumedSampler(batches.sampler, done * batches.batch_size)
    # With workers the first batches are fetched before Lightning sets the epoch.
    batches.sampler.set_epoch(epoch)
    return done


def _batches_of(loader: Any) -> BatchSampler | None:
    """Return the batch sampler whose sampler decides the order; None for dataloaders with a state of their own."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return None
    batches = loader.batch_sampler
    return batches if isinstance(batches, BatchSampler) and isinstance(batches.sampler, Sampler) else None
