"""Committed checkpoints in a store: functions that open, summarise and verify them, without torch where possible."""
