"""The part `staging` of the benchmark."""
