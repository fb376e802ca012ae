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
    try:
        from ejkernel.cli import main

        return main(discovered=False)
    except Exception as error:
        others = _other_owners()
        if not others:
            raise
        print(
            f"ejkernel: {' and '.join(others)} replaced files of ejkernel-core ({error}); run: pip uninstall {' '.join(others)}, "
            "then install ejkernel-core again with: --force-reinstall --no-deps",
            file=sys.stderr,
        )
        return 1


def _other_owners() -> list[str]:
    """Other distributions with files in the import package `ejkernel`: the command `doctor` may not even start."""
    from importlib.metadata import packages_distributions

    return sorted({*packages_distributions().get("ejkernel", ())} - {"ejkernel-core"})
