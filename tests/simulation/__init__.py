"""A deterministic simulator: many actors on one bucket in memory, on the product's own code."""
