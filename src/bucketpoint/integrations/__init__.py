"""Integrations with training frameworks, one module for each. A program imports only the module that it uses."""
