"""`ejkernel.autotune`: the door to tuning. The search itself is a `Tuner` that someone installs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    if not _installed:
        raise NoTunerError(
            "autotune: searching for configs is not part of this version of ejkernel; give configs by cfg=, ejkernel.overlay or a table"
        )
    return _installed[0].tune(record_calls(function, *args, **kwargs))
