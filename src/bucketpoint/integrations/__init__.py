"""Integrations with other trainers: one module for each, imported by programs that use that trainer only."""
