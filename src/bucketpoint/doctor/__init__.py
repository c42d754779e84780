"""Examination of a store: its fitness for checkpoints, and its speed."""
