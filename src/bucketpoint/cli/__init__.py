"""The command line: arguments, output and exit codes around the package's functions."""
