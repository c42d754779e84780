"""Integrations with other trainers: one module for each trainer, imported by that trainer only."""
