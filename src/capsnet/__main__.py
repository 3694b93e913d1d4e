"""`python -m capsnet`, the command line by the name of the package."""

import sys

from capsnet.cli import main

if __name__ == "__main__":
    sys.exit(main())
