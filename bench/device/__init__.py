"""Figures of a machine with a GPU and many cores: `python -m bench.device`. MinIO runs on the same machine."""
