"""The part `ranks` of the benchmark."""
