"""The catalog of a run: commit records, notes on checkpoints, pruning and sweeping."""
