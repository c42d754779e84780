"""A real Prometheus that scrapes the example's demo, and promtool's tests of its alert rules."""
