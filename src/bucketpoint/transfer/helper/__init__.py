"""The upload helper: a process that uploads for a trainer. It shares the trainer's memory, but not its GIL."""
