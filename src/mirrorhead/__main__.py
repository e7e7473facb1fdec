"""`python -m mirrorhead`."""

import sys

from mirrorhead.cli import main

if __name__ == "__main__":
    sys.exit(main())
