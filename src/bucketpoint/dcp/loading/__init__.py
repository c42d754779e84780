"""The load path: the bytes that are read for DCP's read items, and their decoding."""
