"""`ejkernel.autotune`: the entry point to tuning."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import jax

from ejkernel._dispatch.recording import RecordedCall, record_calls
from ejkernel._plugins.containment import refuse_answers
from ejkernel.configs.result import AutotuningResult
from ejkernel.errors import TracingError
from ejkernel.utils.tracing import is_tracing


class Tuner(Protocol):
    """Searches configs for calls by running them on random inputs of their shapes, never while tracing."""

    def tune(self, calls: Sequence[RecordedCall]) -> AutotuningResult:
        """The fastest configs among those whose results match the reference."""
        ...


_installed: list[Tuner] = []


def install_tuner(tuner: Tuner | None) -> None:
    """Use this tuner for `autotune`, for example `Search(rounds=20)`; None goes back to `Search()`."""
    refuse_answers("install_tuner")
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
    """Have calls tuned by this tuner, by the installed one, or by `Search()`."""
    from ejkernel.tuning._search import Search

    tuner = tuner or next(iter(_installed), None) or Search()
    return tuner.tune([call for call in calls if call.phase == "forward" or not _forward_only.get()])


def autotune(function: Callable[..., Any], *args: Any, **kwargs: Any) -> AutotuningResult:
    """Tune every ejkernel call that a function makes, for both phases where it differentiates.

    The function itself is only traced. Each of its calls is run alone, on random inputs of its shapes, with every config of
    every platform that may run it; what gives other numbers than the reference is set aside, the others are timed.

    Args:
        function: the program; `jax.grad` and others may be applied to it. See `ejkernel.tuning.record_calls`.
        *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s; options as they are.
        **kwargs: its keyword arguments.

    Returns:
        The configs found; nothing is in force until they are used as a context manager or remembered or stored. In a job of
        several processes the first one tunes and all get its result.

    Raises:
        TracingError: called while another program is traced.
        ValueError: the program is built for a device that this process does not have.

    Example:
        >>> import ejkernel
        >>> x = jax.ShapeDtypeStruct((4, 64), "float32")
        >>> result = ejkernel.autotune(lambda x: ejkernel.rms_norm(x), x)
        >>> with result:
        ...     out = ejkernel.rms_norm(jax.numpy.ones((4, 64)))
    """
    return _on_first_process(lambda: tune(record_calls(function, *args, **kwargs)))


def _refuse_while_tracing() -> None:
    if is_tracing():
        raise TracingError(
            "autotune: called while a program is traced, where nothing can be timed; call it outside of jit, grad and vmap with "
            "the function, transformed where it needs to be, and arrays or ShapeDtypeStructs of its arguments, then run the "
            "compiled function under `with result:`"
        )


def _on_first_process(tune: Callable[[], AutotuningResult]) -> AutotuningResult:
    """What `tune` gives on the first process of a job, on all of them."""
    _refuse_while_tracing()
    if jax.process_count() == 1:
        return tune()
    import numpy as np
    from jax.experimental import multihost_utils

    text = np.frombuffer((tune().dumps() if jax.process_index() == 0 else "").encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int64(text.size)))
    padded = np.zeros(length, np.uint8)
    padded[: text.size] = text
    return AutotuningResult.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)).decode())
