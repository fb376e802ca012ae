"""Data races of kernels on a host: Python with ThreadSanitizer, for which the fibers of `host` are threads.

    python host_races.py -m pytest -q test_paged_attention_on_host.py

It exits with 66 after any data race and reports the lines. Barriers and mbarriers order threads; shuffles do not. MMAs do not
either, but their stand-ins synchronise the warp's lanes, which hides races within a warp.
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
    """ThreadSanitizer's runtime, which must be loaded before Python."""
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
    """Python with these arguments, without address space randomisation, which ThreadSanitizer does not support."""
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    return [*fixed, sys.executable, *arguments]


if __name__ == "__main__":
    sys.exit(subprocess.run(command(*sys.argv[1:]), env=environment(), check=False).returncode)
