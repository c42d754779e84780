"""The `.metadata` object of a checkpoint: its pickle, bucketpoint's facts in it, and the deletion marker."""
