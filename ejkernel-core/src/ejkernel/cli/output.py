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

_GAP = 2
"""Blanks between the columns of a table."""

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


def say(screen: Any, text: str, *, style: str = "") -> None:
    """Print a text as it is: broken between words on a terminal, each of its lines whole in a file."""
    screen.print(text, style=style or None, markup=False, soft_wrap=not screen.is_terminal)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "", wrap: Sequence[str] = ()) -> Table:
    """A table without a frame, of which nothing is cut however narrow the console is.

    Args:
        columns: their headings.
        rows: cells: texts, in which markup is not read, or rich texts such as `verdict(...)`.
        title: printed above.
        wrap: columns that may be broken into lines, between words; none means the last.
    """
    return Table(columns, rows, title, wrap or columns[-1:])


class Table:
    """What `table` returns: drawn with rows side by side where their words fit, else one below another."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str, wrap: Sequence[str]) -> None:
        from rich.text import Text

        self.columns, self.title, self.wrap = columns, title, frozenset(wrap)
        self.rows = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]

    def __rich_console__(self, screen: Any, options: Any) -> Generator[Any]:
        widths = [self._least_width(place) for place in range(len(self.columns))]
        side_by_side = sum(widths) + _GAP * (len(widths) - 1) <= options.max_width
        yield self._side_by_side(widths) if side_by_side else self._below_another()

    def _least_width(self, place: int) -> int:
        """Of a column: the whole of its cells, or their longest word where they may be broken."""
        from rich.cells import cell_len

        name = self.columns[place]
        cells = [row[place].plain for row in self.rows]
        parts = [word for cell in cells for word in (cell.split() if name in self.wrap else cell.splitlines())]
        return max(map(cell_len, (name, *parts)))

    def _side_by_side(self, widths: Sequence[int]) -> Any:
        from rich import box, table

        made = table.Table(
            box=box.SIMPLE_HEAD,
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            header_style="dim",
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),
        )
        for name, width in zip(self.columns, widths, strict=True):
            made.add_column(name, overflow="fold", no_wrap=name not in self.wrap, min_width=width)
        for row in self.rows:
            made.add_row(*row)
        return made

    def _below_another(self) -> Any:
        """The first cell of a row, and below it the others that say something, with their headings."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        lines: list[Any] = [Text(self.title, style="bold")] if self.title else []
        for first, *others in self.rows:
            lines.append(first)
            named = zip(self.columns[1:], others, strict=True)
            lines += [Padding(Text(f"{name}: ", style="dim") + cell, (0, 0, 0, 2)) for name, cell in named if cell.plain]
        return Group(*lines)


_STYLES = {
    **dict.fromkeys(("ok", "chosen", "fastest", "good", "yes"), "green"),
    **dict.fromkeys(("broken", "conflict", "bad", "incompatible", "no"), "bold red"),
    **dict.fromkeys(("missing requirement", "refused", "forbidden", "none"), "yellow"),
    **dict.fromkeys(("opt-in", "available", "not asked for", "disabled"), "dim"),
}


def verdict(word: str) -> Any:
    """A word of state, coloured by what it means."""
    from rich.text import Text

    return Text(word, style=_STYLES.get(word, ""))
