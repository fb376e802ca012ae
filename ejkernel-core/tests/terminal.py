"""Runs a program in a pseudo-terminal and says what a user sees there in the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS, ROWS = 80, 24

CODE = """
import sys, ejkernel_launcher
sys.argv = ["ejkernel", *sys.argv[1:]]
status = ejkernel_launcher.main()
print("imported:", *sorted({"jax", "numpy"} & {*sys.modules}), file=sys.stderr)
sys.exit(status)
"""
"""The program `ejkernel`, and whether it imported what takes long."""

_PIECE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


class Seen(NamedTuple):
    """What is on the terminal, with what scrolled off it, and the status that the program ended with."""

    lines: list[str]
    status: int

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def words(self) -> list[str]:
        return self.text.split()


def see(
    arguments: Sequence[str], *, columns: int = COLUMNS, rows: int = ROWS, stdout: Path | None = None, **environment: str
) -> Seen:
    """Run the program `ejkernel` in a terminal of that size; with `stdout`, what it prints there goes into a file."""
    code = "import sys; from ejkernel_launcher import main; sys.argv[0] = 'ejkernel'; sys.exit(main())"
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    variables = {**inherited, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu", **environment}
    with contextlib.ExitStack() as files:
        # Not pty.fork: JAX warns of a fork, since its threads may hold locks.
        program = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, *arguments],
            env=variables,
            stdin=end,
            stdout=end if stdout is None else files.enter_context(stdout.open("wb")),
            stderr=end,
            start_new_session=True,
        )
    os.close(end)
    output = bytearray()
    while piece := _read(terminal):
        output += piece
    os.close(terminal)
    return Seen(_drawn(output.decode(), columns), program.wait())


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that the program has ended
        return b""


def _drawn(output: str, columns: int) -> list[str]:
    """The lines after all that moves the cursor, erases lines and overwrites them."""
    lines: list[str] = [""]
    row = column = 0
    for piece in _PIECE.finditer(output):
        numbers, letter = piece[1], piece[2]
        if letter == "A":
            row = max(0, row - int(numbers or 1))
        elif letter == "K":
            lines[row] = "" if numbers == "2" else lines[row][:column]
        elif letter is not None:
            assert letter in "mhl", f"the terminal does not know {piece[0]!r}"
        elif piece[0] == "\r":
            column = 0
        elif piece[0] == "\n":
            row += 1
        for character in piece[0] if letter is None and piece[0] not in "\r\n" else "":
            if column == columns:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + character + line[column + 1 :], column + 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def complete(line: str) -> list[str]:
    """What a shell is told to offer after a line; it waits for no JAX."""
    environment = {
        "_EJKERNEL_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": line,
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=environment)
    assert done.stderr in ("", "imported:\n")
    return [offer.split("\t")[0] for offer in done.stdout.splitlines()]
