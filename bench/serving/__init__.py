"""The part `serving` of the benchmark."""
