"""The part `losses` of the benchmark."""
