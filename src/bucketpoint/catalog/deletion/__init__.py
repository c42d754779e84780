"""Deletion of checkpoints: tombstones, the pruner, removal by hand, rollback, thinning, and the sweep of dead saves."""
