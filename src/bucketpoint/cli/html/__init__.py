"""A page that describes a run: markup, charts and sections."""
