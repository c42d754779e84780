"""The order in which dataloaders of a `Trainer` give samples: repeated by a resumed run, on any number of ranks.

Lightning begins an interrupted epoch with the first batch again unless the dataloader has a state of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

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


class SeededSampler(Sampler[Any]):
    """A random sampler whose draws follow from the seed and the epoch.

    Args:
        around: the distributed sampler that gives each rank its part, and knows the epoch.
    """

    def __init__(self, sampler: Any, around: Any = None) -> None:
        self.sampler = sampler
        self.epoch = 0
        self._around = self if around is None else around

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            generator = self.sampler.generator or torch.default_generator
            generator.manual_seed(_seed() + self._around.epoch)
            return iter(list(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def with_repeatable_order(loader: Any, epoch: int) -> None:
    """Let a dataloader shuffle by seed and epoch, as Lightning's samplers for several ranks do.

    Otherwise the order comes from torch's generator, and no later run, on any number of ranks, finds it again.

    Args:
        epoch: the next epoch. With workers its first batches are fetched before Lightning sets it.
    """
    batches = _batches_of(loader)
    if batches is None:
        return
    sampler: Any = batches.sampler
    if isinstance(sampler, ResumedSampler):
        # The dataloader was resumed before in this process.
        sampler = sampler.sampler
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        sampler = DistributedSampler(sampler.data_source, 1, 0, seed=_seed())  # type: ignore[arg-type]
    elif _is_random(sampler):
        sampler = SeededSampler(sampler)
    elif isinstance(sampler, DistributedSamplerWrapper) and _is_random(sampler.dataset._sampler):
        sampler.dataset._sampler = SeededSampler(sampler.dataset._sampler, sampler)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    batches.sampler = sampler


def samples_in_a_batch(loader: Any, world: int) -> int | None:
    """Return how many samples all ranks together take from a dataloader at a time; None if that is not known."""
    batches = _batches_of(loader)
    if batches is None:
        return None
    sampler = batches.sampler.sampler if isinstance(batches.sampler, ResumedSampler) else batches.sampler
    # A sampler of the program's own is taken to give each rank its part.
    return batches.batch_size * getattr(sampler, "num_replicas", world)


def resume(loader: Any, samples: int, world: int) -> int:
    """Let a dataloader leave out samples that all ranks together have taken from the epoch. Return its batches so far.

    Raises:
        BucketpointError: the ranks now take another number of samples at a time, which does not divide those taken.
    """
    batches, at_a_time = _batches_of(loader), samples_in_a_batch(loader, world)
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
    return done


def _batches_of(loader: Any) -> BatchSampler | None:
    """Return the batch sampler whose sampler decides the order; None for dataloaders with a state of their own."""
    if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
        return None
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    # A class with an `__iter__` of its own may put batches together in another way.
    if not isinstance(batches, BatchSampler) or type(batches).__iter__ is not BatchSampler.__iter__:
        return None
    return batches if isinstance(batches.sampler, Sampler) else None


def _is_random(sampler: Any) -> bool:
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def _seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
