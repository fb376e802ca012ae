"""The program `ejkernel`.

A module beside the package, because `import ejkernel` discovers plugins, which imports JAX. The program needs neither for its
version, its help and its completions, so that it discovers plugins when a command runs.
"""

from __future__ import annotations

import sys

running = False
"""Whether this process is the program; `import ejkernel` then leaves discovery to the command line."""


def main() -> int:
    """Run the command line of this process and return its exit status."""
    global running
    running = True
    if sys.argv[1:] == ["--version"]:
        from ejkernel._version import __version__

        print(__version__)
        return 0
    from ejkernel.cli import main

    return main(discovered=False)
