"""The catalog of a run: commit records, notes on checkpoints, pruning and sweeping."""

from bucketpoint.catalog.catalog import Catalog, latest_checkpoint, open_catalog

__all__ = ["Catalog", "latest_checkpoint", "open_catalog"]
