"""Errors and warnings of ejkernel, and the one way argument errors are worded."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import inspect
import re
import warnings
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

_PUBLIC: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("public argument names", default=None)


class EjkernelError(Exception):
    """Base class of errors that ejkernel itself defines."""


class NoKernelError(EjkernelError, NotImplementedError):
    """No admitted implementation can run this call. The message is the table of candidates and what to do next."""

    def __init__(self, message: str, explanation: Any = None) -> None:
        super().__init__(message)
        self.explanation = explanation


class PluginError(EjkernelError):
    """A plugin could not be used; raised instead of warned under `EJKERNEL_STRICT=1`."""


class NoConfigError(EjkernelError, RuntimeError):
    """No tier has a config for the chosen implementation: its heuristic failed."""


class NoTunerError(EjkernelError, NotImplementedError):
    """Tuning was asked for something that has no reference to check configs against."""


class TracingError(EjkernelError, RuntimeError):
    """Something that runs programs was asked for while one is traced."""


class AnnotationError(EjkernelError, TypeError):
    """Under `EJKERNEL_TYPECHECK=1`: what a function accepted or returned is not what its annotation says; either is wrong."""


class EjkernelWarning(UserWarning):
    """Base class of the warnings that ejkernel issues."""


class PluginWarning(EjkernelWarning):
    """A plugin was found and could not be used."""


class FallbackWarning(EjkernelWarning):
    """A call on an accelerator runs on the portable path because nothing faster admits it."""


class CacheWarning(EjkernelWarning):
    """The cache could not be read or written; tuned configs or compiled kernels are treated as missing."""


@contextlib.contextmanager
def argument_names(**public: str) -> Generator[None]:
    """Within, or in the decorated function, argument errors say `public[name]` where an operation's own check says `name`."""
    token = _PUBLIC.set({**public, **(_PUBLIC.get() or {})})
    try:
        yield
    finally:
        _PUBLIC.reset(token)


def invalid(argument: str, got: Any, expected: str, *, remedy: str = "") -> ValueError:
    """A `ValueError` naming argument, what it got and what was expected, in one line."""
    return ValueError(_sentence(argument, got, expected, remedy))


def wrong_type(argument: str, got: Any, expected: str, *, remedy: str = "") -> TypeError:
    """A `TypeError` naming argument, what it got and what was expected, in one line."""
    return TypeError(_sentence(argument, got, expected, remedy))


def _sentence(argument: str, got: Any, expected: str, remedy: str) -> str:
    if public := _PUBLIC.get():
        argument = public.get(argument, argument)
        expected = re.sub(r"\w+", lambda word: public.get(word[0], word[0]), expected)
    return f"{argument}: got {got}, expected {expected}" + (f"; {remedy}" if remedy else "")


_PASSED_OVER = ("ejkernel", "jax", "jaxlib", "contextlib", "functools", "importlib", "_frozen_importlib")
"""Top-level packages between a caller's line and the place that warns; JAX traces in between."""


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning that names the line of the caller: the innermost one outside ejkernel, its plugins and JAX."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and _is_passed_over(frame):
        frame = frame.f_back
    assert frame is not None  # CPython has frames
    space = frame.f_globals
    module = space.get("__name__", "<unknown>")  # None would be silent
    registry = space.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _is_passed_over(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _PASSED_OVER or package.startswith("ejkernel_")


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'triton'?` when a known name is close, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_one_line(error: BaseException) -> str:
    """An exception of someone else's as a line of a report."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:500]
