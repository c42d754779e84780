"""Which checkpoints a policy keeps: pure data in, pure data out. No I/O of any kind, and no torch."""
