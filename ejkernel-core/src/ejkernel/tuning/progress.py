"""The progress bar of tuning and benchmarks: rich where it is installed and stderr is a terminal, silence elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Generator
from types import TracebackType
from typing import Any


class Progress:
    """Calls tuned so far, and the best config of the one at hand."""

    def __init__(self, wanted: bool | None, calls: int) -> None:
        shown = sys.stderr.isatty() if wanted is None else wanted
        self._bar: Any = _bar() if shown and importlib.util.find_spec("rich") else None
        self._calls: Any = self._bar and self._bar.add_task("calls", total=calls, best="")
        self._configs: Any = None
        self._live: Any = None

    def __enter__(self) -> Progress:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None and kind is None:
            self._bar.update(self._calls, completed=self._bar.tasks[self._calls].total)
        self._stop()

    def begin(self, name: str, configs: int) -> None:
        """The next call, with so many configs to try."""
        if self._bar is not None:
            if self._configs is not None:
                self._bar.advance(self._calls)
                self._bar.remove_task(self._configs)  # what is done would fill the terminal
            self._configs = self._bar.add_task(name, total=configs, best="checking")

    def advance(self) -> None:
        """One config more is checked."""
        if self._bar is not None:
            self._bar.advance(self._configs)

    def best(self, text: str) -> None:
        """Show the best so far."""
        if self._bar is not None:
            self._bar.update(self._configs, best=text)

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Take the bar off the terminal while the block prints, or the bar's next frame would be drawn over what it printed."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        """Each time on a display of its own: one that is started again erases as many lines as it had drawn before."""
        if self._bar is not None:
            from rich.live import Live

            screen, frame = self._bar.console, self._bar.get_renderable
            self._live = Live(console=screen, get_renderable=frame, transient=True, redirect_stdout=False)
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()


def _bar() -> Any:
    """On stderr alone: what is printed to stdout meanwhile stays there, and may go to a file."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    best = TextColumn("{task.fields[best]}", table_column=Column(ratio=1, no_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(), TimeElapsedColumn(), best)
    return Progress(*columns, console=Console(stderr=True), expand=True)
