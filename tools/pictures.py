"""Pictures that scripts draw into a folder of the documentation, which hold no others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(folder: Path, wanted: Mapping[str, str], tool: str, description: str | None) -> int:
    """What such a script does: write the pictures, or with `--check` say which are out of date; its exit status.

    Args:
        folder: of the pictures.
        wanted: the name of each file -> its text.
        tool: the script's path, for the advice.
        description: of the script.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    there = {path.name: path.read_text() for path in folder.glob("*.svg")}
    outdated = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if check:
        if outdated:
            print(f"{', '.join(outdated)}: out of date; run python {tool}", file=sys.stderr)
        return int(bool(outdated))
    folder.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (folder / name).unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)
    return 0
