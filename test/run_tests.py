"""Runs the tests of the kernels: `python test/run_tests.py [--xla] [--triton] [--comparison] [-k WORDS] [--verbose] [--failfast]`.

Without a choice all three run. Of similar tests one in four is run; `--extent=standard` runs all. What follows `--` goes to pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITES = {"xla": "ejkernel-xla/tests", "triton": "ejkernel-triton/tests", "comparison": "tests/comparison"}
MEANINGS = {
    "xla": "the XLA kernels",
    "triton": "the Triton kernels; without a GPU in Triton's interpreter",
    "comparison": "XLA against Triton on the same inputs",
}
NEEDED = ("pytest", "ejkernel", "ejkernel_xla", "ejkernel_triton")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the tests of the kernels.")
    for suite, meaning in MEANINGS.items():
        parser.add_argument(f"--{suite}", action="store_true", help=f"only {meaning}")
    parser.add_argument("-k", "--keyword", dest="k", default=None, metavar="WORDS", help="only tests whose names match")
    parser.add_argument("--verbose", "-v", action="store_true", help="name each test")
    parser.add_argument("--failfast", "-x", action="store_true", help="stop at the first failure")
    parser.add_argument("--extent", default="quick", choices=("quick", "standard", "full"), help="how many of similar tests")
    parser.add_argument("--tb", default="short", help="how much of a traceback, as in pytest")
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        command = 'pip install -e "./ejkernel-core[cli,testing]" -e ./ejkernel-xla -e ./ejkernel-triton'
        parser.exit(2, f"{', '.join(missing)} cannot be imported; run {command} in {ROOT}\n")
    chosen = [suite for suite in SUITES if getattr(given, suite)] or [*SUITES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"--extent={given.extent}",
        f"--tb={given.tb}",
        *(SUITES[suite] for suite in chosen),
    ]
    command += ["-v"] if given.verbose else ["-q"]
    command += ["-x"] if given.failfast else []
    command += ["-k", given.k] if given.k else []
    return subprocess.run([*command, *given.rest], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
