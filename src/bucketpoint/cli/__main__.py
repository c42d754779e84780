"""`python -m bucketpoint.cli`: the program where its script is not on the PATH."""

from bucketpoint.cli.app import main

main()
