"""`python -m ejkernel`, for where the command `ejkernel` is not on the PATH."""

from ejkernel.cli import main

if __name__ == "__main__":
    main()
