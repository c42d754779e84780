"""Committed checkpoints in a store: opened, inspected, verified and summed up, without torch where possible."""
