"""Planners: assignment of items to ranks for a save, and selection of saved chunks for a load."""
