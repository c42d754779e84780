"""The part `unchanged` of the benchmark."""
