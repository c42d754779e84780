"""`python -m bucketpoint`: the command line, for environments in which its script is not on the PATH."""

from bucketpoint.cli.app import main

main()
