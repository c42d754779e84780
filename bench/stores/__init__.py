"""The part `stores` of the benchmark."""
