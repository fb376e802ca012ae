"""What `ejkernel bench` does with results that are there: draws one, compares two."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import typer

from ejkernel.cli.output import UserError, console, emit, say, user_mistakes


def show_comparison(old: Path, new: Path, *, everything: bool, as_json: bool) -> None:
    """Print what changed between two results; ends the command with 1 on a regression."""
    with _reading("--compare"):
        from ejkernel_bench import compare_files

        found = compare_files(old, new)
    if as_json:
        emit(found.to_dict())
    else:
        screen, made = console(), found.table(everything=everything)
        if made.rows:
            screen.print(made)
        say(screen, found.summary())
    if found.regressions:
        raise typer.Exit(1)


def draw_file(recorded: Path, folder: Path) -> None:
    """Draw a result that was recorded earlier."""
    with _reading("--from"):
        from ejkernel_bench import read_document

        document = read_document(recorded)
    draw(document, folder)


def draw(result: Any | Mapping[str, Any], folder: Path) -> None:
    """Write the page and the pictures of a result, and say where."""
    from ejkernel_bench.report import write

    try:
        page, *pictures = write(result, folder)
    except OSError as error:
        raise UserError(f"--plots: {folder}: {error.strerror or error}") from error
    console(stderr=True).print(f"{page} and {len(pictures)} pictures beside it", markup=False, soft_wrap=True)


def what_plots_need() -> str | None:
    """What must be installed before there can be pictures."""
    from ejkernel_bench.report import missing

    return missing()


@contextlib.contextmanager
def _reading(option: str) -> Generator[None]:
    """Files that cannot be read or are no results are the user's mistake."""
    with user_mistakes():
        try:
            yield
        except OSError as error:
            raise UserError(f"{option}: {error.filename}: {error.strerror or error}") from error
