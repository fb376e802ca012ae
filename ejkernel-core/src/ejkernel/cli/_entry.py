"""`ejkernel`: checks that the command line's own packages are there, then runs it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None, *, discovered: bool = True) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: what follows the program's name; None takes them from `sys.argv`.
        discovered: whether plugins have been discovered; if not, they are before a command runs.

    Returns:
        0 for success, 1 where a check failed, 2 for a mistake in what was asked.
    """
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        needs = f"the command line needs {' and '.join(missing)}"
        print(f'ejkernel: {needs}; install them with: pip install "ejkernel-core[cli]"', file=sys.stderr)
        return 2
    from ejkernel.cli._app import run

    return run(sys.argv[1:] if arguments is None else arguments, discovered=discovered)
