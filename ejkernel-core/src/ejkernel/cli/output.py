"""What all commands share: the console, JSON on stdout, and errors that are the user's."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Sequence
from typing import Annotated, Any

import typer

_FILE_WIDTH = 160

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class UserError(Exception):
    """A mistake in what was asked; ends the command with one line and status 2."""


@contextlib.contextmanager
def user_mistakes() -> Generator[None]:
    """Report what the library refuses inside the block as the user's mistake."""
    from ejkernel.errors import EjkernelError

    try:
        yield
    except (ValueError, TypeError, EjkernelError) as error:
        raise UserError(first_line(error)) from error


@contextlib.contextmanager
def own_output() -> Generator[None]:
    """Keep what plugins print inside the block off the standard output, on which a command answers."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def first_line(error: BaseException) -> str:
    """The part of a message that fits on a line."""
    return str(error).partition("\n")[0]


def emit(value: Any) -> None:
    """Print a JSON document."""
    print(json.dumps(value, indent=2))


def console(*, stderr: bool = False) -> Any:
    """The console that commands print on: as wide as the terminal or `COLUMNS` says; in a file, nothing is cut."""
    from rich.console import Console

    made = Console(highlight=False, soft_wrap=False, stderr=stderr)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _FILE_WIDTH
    return made


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "", wrap: Sequence[str] = ()) -> Any:
    """A table without a frame.

    Args:
        columns: their headings.
        rows: cells: texts, in which markup is not read, or rich renderables such as `verdict(...)`.
        title: printed above.
        wrap: columns that may be broken into lines; none means the last.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        show_edge=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name in columns:
        made.add_column(name, overflow="fold", no_wrap=name not in (wrap or columns[-1:]))
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


_STYLES = {
    **dict.fromkeys(("ok", "chosen", "good", "yes"), "green"),
    **dict.fromkeys(("broken", "conflict", "bad", "incompatible", "no"), "bold red"),
    **dict.fromkeys(("missing requirement", "refused", "forbidden", "none"), "yellow"),
    **dict.fromkeys(("opt-in", "available", "not asked for", "disabled"), "dim"),
}


def verdict(word: str) -> Any:
    """A word of state, coloured by what it means."""
    from rich.text import Text

    return Text(word, style=_STYLES.get(word, ""))
