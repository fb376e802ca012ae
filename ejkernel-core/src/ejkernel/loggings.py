"""Loggers that write to the terminal by themselves, and give way to the application's own logging."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from typing import TextIO


class _Terminal(logging.Handler):
    """Writes to whatever `sys.stderr` is now. Silent once the application has handlers, which receive the same records."""

    def emit(self, record: logging.LogRecord) -> None:
        top = logging.getLogger(record.name.partition(".")[0])
        stream: TextIO | None = sys.stderr  # None in a program without a console
        if logging.getLogger().handlers or any(handler is not self for handler in top.handlers) or stream is None:
            return
        _writer(stream).handle(record)


@functools.lru_cache(maxsize=1)
def _writer(stream: TextIO) -> logging.Handler:
    """Rich's handler on a terminal, where rich is installed; else the standard library's."""
    if stream.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console
            from rich.logging import RichHandler

            handler = RichHandler(console=Console(file=stream), show_time=False, show_path=False)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            return handler
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    return handler


def get_logger(name: str, level: int | str | None = None) -> logging.Logger:
    """The standard library's logger of that name, with a terminal handler on its top-level package.

    On a terminal lines are coloured where rich is installed (`ejkernel-core[cli]`).

    Args:
        name: usually `__name__`.
        level: set on this logger if given; else the usual inheritance applies (WARNING by default).

    Returns:
        `logging.getLogger(name)`. The root logger is never touched, and records propagate as usual.
    """
    top = logging.getLogger(name.partition(".")[0])
    if top is not logging.getLogger() and not any(isinstance(handler, _Terminal) for handler in top.handlers):
        top.addHandler(_Terminal())
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
    return logger
