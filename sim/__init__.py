"""The simulation of large jobs: run it with `make simulate`; `docs/scale.md` holds what it found."""
