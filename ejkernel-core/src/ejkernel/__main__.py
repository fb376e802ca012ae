"""`python -m ejkernel`, for where the command `ejkernel` is not on the PATH."""

import sys

from ejkernel.cli import main

if __name__ == "__main__":
    sys.exit(main())
