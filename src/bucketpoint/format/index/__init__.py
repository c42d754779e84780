"""The index: an object beside a large `.metadata`, with the same content in columns."""
