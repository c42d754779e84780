"""`save` and `load` as collective calls that end on all ranks by a deadline."""
