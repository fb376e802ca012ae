"""`ejkernel.autotune`: the door to tuning. The search itself is a `Tuner` that someone installs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from ejkernel.errors import NoTunerError
from ejkernel.tuning._recording import RecordedCall, record_calls
from ejkernel.tuning._result import AutotuningResult


class Tuner(Protocol):
    """Searches configs for calls by running them on random inputs of their shapes, never while tracing."""

    def tune(self, calls: Sequence[RecordedCall]) -> AutotuningResult:
        """The fastest configs among those whose results match the reference."""
        ...


_installed: list[Tuner] = []


def install_tuner(tuner: Tuner | None) -> None:
    """Use this tuner for `autotune`; None takes the current one away."""
    _installed[:] = [] if tuner is None else [tuner]


_forward_only = contextvars.ContextVar("ejkernel_forward_autotune_only", default=False)


@contextlib.contextmanager
def forward_autotune_only() -> Generator[None]:
    """Inside the `with` block tuning leaves backward phases as they are; it never changes what runs."""
    token = _forward_only.set(True)
    try:
        yield
    finally:
        _forward_only.reset(token)


def tune(calls: Sequence[RecordedCall], tuner: Tuner | None = None) -> AutotuningResult:
    """Have calls tuned by this tuner, or by the installed one.

    Raises:
        NoTunerError: there is none.
    """
    tuner = tuner or next(iter(_installed), None)
    if tuner is None:
        raise NoTunerError(
            "autotune: searching for configs is not part of this version of ejkernel; give them by cfg= or ejkernel.overlay"
        )
    return tuner.tune([call for call in calls if call.phase == "forward" or not _forward_only.get()])


def autotune(function: Callable[..., Any], *args: Any, **kwargs: Any) -> AutotuningResult:
    """Tune every ejkernel call that a function makes, for both phases where it differentiates.

    Args:
        function: the program; see `ejkernel.tuning.record_calls`.
        *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: its keyword arguments.

    Returns:
        The configs found; nothing is in force until they are used as a context manager or remembered or stored.

    Raises:
        NoTunerError: no tuner is installed.
    """
    return tune(record_calls(function, *args, **kwargs) if _installed else ())
