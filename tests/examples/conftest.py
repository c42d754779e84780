"""The program as a function, and MinIO by the environment, as in the tests of the commands."""

from cli.conftest import fresh_clients, program, reached

__all__ = ["fresh_clients", "program", "reached"]
