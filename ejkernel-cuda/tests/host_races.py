"""Races in kernels, seen on a host: Python with ThreadSanitizer, for which the fibers of `host` are threads.

    python host_races.py -m pytest -q test_paged_attention_on_host.py

It exits with 66 where anything raced, and says which lines. Barriers and mail order what threads do; what lanes give each other
does not. Nor do products, but their stand-ins wait for the warp's lanes, which hides races within a warp.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

SUPPRESSIONS = pathlib.Path(__file__).parent / "host" / "races.supp"
RACED = 66


def library() -> pathlib.Path:
    """ThreadSanitizer's, which must be there before Python is."""
    asked = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    return pathlib.Path(asked.stdout.strip())


def missing() -> str | None:
    if sys.platform != "linux" or shutil.which("g++") is None or not library().is_absolute():
        return "needs g++ on Linux with ThreadSanitizer"
    return None


def environment() -> dict[str, str]:
    options = f"suppressions={SUPPRESSIONS} exitcode={RACED} ignore_noninstrumented_modules=1 report_thread_leaks=0"
    return {**os.environ, "EJKERNEL_HOST_RACES": "1", "LD_PRELOAD": str(library().resolve()), "TSAN_OPTIONS": options}


def command(*arguments: str) -> list[str]:
    """Of Python with these arguments. ThreadSanitizer wants addresses where it knows them."""
    still = ["setarch", "-R"] if shutil.which("setarch") else []
    return [*still, sys.executable, *arguments]


if __name__ == "__main__":
    sys.exit(subprocess.run(command(*sys.argv[1:]), env=environment(), check=False).returncode)
