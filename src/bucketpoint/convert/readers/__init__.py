"""Readers of the formats that a checkpoint can be converted from."""
