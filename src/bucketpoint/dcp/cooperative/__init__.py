"""Cooperative loading: one rank reads each range and sends it to all ranks that need it."""
