"""The tuner's progress bar: rich where it is installed and stderr is a terminal, silence elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from types import TracebackType
from typing import Any


class Progress:
    """Calls tuned so far, and the best config of the one at hand."""

    def __init__(self, wanted: bool | None, calls: int) -> None:
        shown = sys.stderr.isatty() if wanted is None else wanted
        self._bar: Any = _bar() if shown and importlib.util.find_spec("rich") else None
        self._calls: Any = self._bar and self._bar.add_task("calls", total=calls, best="")
        self._configs: Any = None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            if kind is None:
                self._bar.update(self._calls, completed=self._bar.tasks[self._calls].total)
            self._bar.stop()

    def begin(self, name: str, configs: int) -> None:
        """The next call, with so many configs to try."""
        if self._bar is not None:
            if self._configs is not None:
                self._bar.advance(self._calls)
            self._configs = self._bar.add_task(name, total=configs, best="checking")

    def advance(self) -> None:
        """One config more is checked."""
        if self._bar is not None:
            self._bar.advance(self._configs)

    def best(self, text: str) -> None:
        """Show the best so far."""
        if self._bar is not None:
            self._bar.update(self._configs, best=text)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text, best = TextColumn("{task.description}"), TextColumn("{task.fields[best]}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), best)
    return Progress(*columns, console=Console(stderr=True))
