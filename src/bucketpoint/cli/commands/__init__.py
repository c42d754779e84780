"""The commands of the program, one module for each, or for a few that share their options."""
