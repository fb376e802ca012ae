"""Loggers whose coloured output is decided as each line is written, and gives way to the application's own logging."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

_COLOURS = {"DEBUG": 36, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 35}


class _Terminal(logging.Handler):
    """Writes to whatever `sys.stderr` is now. Silent once the application has handlers, which receive the same records."""

    def emit(self, record: logging.LogRecord) -> None:
        top = logging.getLogger(record.name.partition(".")[0])
        if logging.getLogger().handlers or any(handler is not self for handler in top.handlers):
            return
        stream: Any = sys.stderr
        if stream is not None:
            stream.write(_line(record, coloured=_wants_colour(stream)) + "\n")


def _wants_colour(stream: TextIO) -> bool:
    return "NO_COLOR" not in os.environ and stream.isatty()


def _line(record: logging.LogRecord, *, coloured: bool) -> str:
    level = f"\033[{_COLOURS.get(record.levelname, 0)}m{record.levelname}\033[0m" if coloured else record.levelname
    return f"{level} {record.name}: {logging.Formatter().format(record)}"


def get_logger(name: str, level: int | str | None = None) -> logging.Logger:
    """The standard library's logger of that name, with a terminal handler on its top-level package.

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
