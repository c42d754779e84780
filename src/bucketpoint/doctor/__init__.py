"""Examination of a store's fitness for checkpoints, and of its speed."""
