"""`python -m selkie`: the command line."""

import sys

from ._selkie import cli

if __name__ == "__main__":
    sys.exit(cli(["selkie", *sys.argv[1:]]))
