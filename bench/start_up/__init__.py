"""The part `start_up` of the benchmark."""
