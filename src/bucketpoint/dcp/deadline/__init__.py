"""`save` and `load` as collective calls that all ranks leave by a deadline."""
