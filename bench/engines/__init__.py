"""The part `engines` of the benchmark."""
