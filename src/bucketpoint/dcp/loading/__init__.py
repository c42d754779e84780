"""The load path: the byte ranges that DCP's read items need, and the decoding of their bytes."""
