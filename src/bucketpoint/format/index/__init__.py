"""The index beside a large `.metadata`: the same content in columns."""
