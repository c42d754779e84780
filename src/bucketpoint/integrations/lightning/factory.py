"""`bucket_strategy`, which makes a strategy with checkpoints at URLs from a strategy of Lightning or Fabric."""

from __future__ import annotations

import functools
from typing import Any

from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy as TrainerStrategy

from bucketpoint.errors import BucketpointError
from bucketpoint.integrations.lightning.fabric import FabricSaves
from bucketpoint.integrations.lightning.trainer import TrainerSaves


def bucket_strategy(kind: Any, *args: Any, **options: Any) -> Any:
    """Make a strategy whose checkpoints are URLs: `Trainer(strategy=bucket_strategy(DDPStrategy))`.

    Saves return once the state is copied, and models and optimizers are saved sharded if the strategy shards them. Any
    strategy made like this can load the checkpoint of any other, on any number of ranks.

    Args:
        kind: `DDPStrategy`, `FSDPStrategy`, `ModelParallelStrategy`, `SingleDeviceStrategy` or a subclass of them: from
            `lightning.pytorch.strategies` for a `Trainer`, from `lightning.fabric.strategies` for a `Fabric`.
        args, options: arguments of `kind`, and two more: `storage_options`, as for `BucketWriter`; and `trusted=True`
            to load values of all types. Otherwise `torch.load(weights_only=True)` loads values other than tensors.

    Raises:
        BucketpointError: `kind` is not a class of strategies of Lightning or Fabric.
    """
    if not (isinstance(kind, type) and issubclass(kind, (TrainerStrategy, FabricStrategy))):
        raise BucketpointError(
            f"bucket_strategy takes the class of a strategy, not {kind!r}",
            remedy="Call bucket_strategy(DDPStrategy) with a class of lightning.pytorch.strategies, or of "
            "lightning.fabric.strategies for a Fabric",
        )
    return _class_of(kind)(*args, **options)


@functools.cache
def _class_of(kind: Any) -> Any:
    saves = TrainerSaves if issubclass(kind, TrainerStrategy) else FabricSaves
    # Launchers that spawn processes pickle the strategy, whose generated class is in no module.
    pickled = {"__reduce__": lambda strategy: (_without_init, (kind,), vars(strategy))}
    return type(f"Bucket{kind.__name__}", (saves, kind), pickled)


def _without_init(kind: Any) -> Any:
    made = _class_of(kind)
    return made.__new__(made)
