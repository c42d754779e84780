"""The part `hedge` of the benchmark."""
