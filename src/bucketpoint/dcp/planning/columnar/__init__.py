"""Save plans as columns: their encoding, the assignment of items to ranks, and its encoding."""
