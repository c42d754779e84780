"""What checkpoints a run has: recorded, noted, pruned and swept. Needs no torch, and knows no training loop."""

from bucketpoint.catalog.catalog import Catalog, latest_checkpoint, open_catalog

__all__ = ["Catalog", "latest_checkpoint", "open_catalog"]
