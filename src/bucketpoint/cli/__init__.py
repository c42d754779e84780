"""The command line. Thin: what is decided and what is moved lives in the rooms to the right."""
