"""megatron-core: `dist_checkpointing` with checkpoints at URLs, atomic saves, and saves in the background.

The strategies are subclasses of megatron's own for the format `torch_dist`, so that megatron and its wrappers for fully
parallel saves and loads accept them.
"""

from __future__ import annotations

try:
    import megatron.core.dist_checkpointing  # noqa: F401 (the modules below need it)
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        "bucketpoint.integrations.megatron needs megatron-core: pip install 'megatron-core>=0.19'", name=error.name
    ) from error

from bucketpoint.integrations.megatron.strategies import BucketLoadStrategy, BucketSaveStrategy
from bucketpoint.integrations.megatron.training import let_stand_for, load, save

__all__ = ["BucketLoadStrategy", "BucketSaveStrategy", "let_stand_for", "load", "save"]
