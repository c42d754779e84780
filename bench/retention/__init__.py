"""The part `retention` of the benchmark."""
