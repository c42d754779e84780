"""The part `stalls` of the benchmark."""
