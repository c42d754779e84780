"""The save path: layout of objects, upload, comparison with earlier saves, and commit."""
