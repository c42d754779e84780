"""Cooperative loading: each range is read by one rank and handed to all ranks that need it."""
