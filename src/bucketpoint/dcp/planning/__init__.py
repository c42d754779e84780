"""Planners: which rank saves which item, and which saved chunks a state is loaded from."""
