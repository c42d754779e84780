"""The stored format: object keys, item frames, the metadata pickle, its index and the commit record."""
