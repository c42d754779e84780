"""The `.metadata` of a checkpoint: its pickle, the facts in it, the entries of items, and the deletion marker."""
