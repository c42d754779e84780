"""A run's checkpoints: what there is, what is kept, what a training loop calls. Knows nothing of DCP's internals.

Names are imported when they are first used: a listing needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bucketpoint.manager.catalog import Catalog, latest_checkpoint, open_catalog
    from bucketpoint.manager.manager import CheckpointManager, Restored

__all__ = ["Catalog", "CheckpointManager", "Restored", "latest_checkpoint", "open_catalog"]

_CATALOG = ("Catalog", "latest_checkpoint", "open_catalog")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _CATALOG:
        from bucketpoint.manager import catalog

        return getattr(catalog, name)
    from bucketpoint.manager import manager

    return getattr(manager, name)
