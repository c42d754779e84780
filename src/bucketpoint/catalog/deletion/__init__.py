"""Deletion of checkpoints: tombstones, pruning, removal by name, thinning, and the sweep of dead saves."""
