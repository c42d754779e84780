"""A process that uploads bytes for a trainer, and shares memory with it, but not the interpreter's lock."""
