"""What the program shares with code of plugins: settings of ejkernel, XLA and JAX, the working directory, warnings, signals.

All of it belongs to the user. A snapshot is taken before such code runs and put back behind it, which another thread of the program
might notice if it changed something in the same moment. So the longer code runs, the less is watched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import jax

from ejkernel._plugins.settings import VARIABLES

Watch = Literal["everything", "what programs depend on", "settings of ejkernel"]
"""While plugins are loaded and code is imported; while they answer, which every dispatch asks for; while kernels are traced."""

_OWN = tuple(variable.name for variable in VARIABLES)
_OF_XLA = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
_OF_JAX = (
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_platforms",
)
_WRITTEN_WHILE_LOWERING = "jax_export_"
"""How settings begin that core itself writes for a moment, in any thread."""
_WRITTEN_BY_JAX = "MOSAIC_GPU_"
"""How variables begin that importing a part of JAX sets for its native code."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Surroundings:
    """A snapshot of what a plugin's code could change."""

    def __init__(self, watch: Watch) -> None:
        own, everything = watch == "settings of ejkernel", watch == "everything"
        self._environment = {name: os.environ.get(name) for name in (_OWN if own else (*_OWN, *_OF_XLA))}
        self._read = dict if own else _all_settings if everything else _few_settings
        self._settings: dict[str, Any] = self._read()
        self._directory = None if own else _directory()
        self._filters = None if own else [*warnings.filters]
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS} if everything else {}

    def restore(self) -> list[str]:
        """Put everything back; what differed, in words. Filters of warnings differ without a word, as many libraries add some."""
        changed = [name for name, value in self._environment.items() if os.environ.get(name) != value]
        for name in changed:
            _write(name, self._environment[name])
        said = [f"the environment variable {', '.join(changed)}"] if changed else []
        settings: dict[str, Any] = self._read()
        for name, value in self._settings.items() if settings != self._settings else ():
            if settings[name] != value:
                jax.config.update(name, value)
                said.append(name)
        if self._directory is not None and _directory() != self._directory:
            os.chdir(self._directory)
            said.append("the working directory")
        if self._filters is not None and warnings.filters != self._filters:
            warnings.filters[:] = self._filters  # pyright: ignore[reportIndexIssue]  # a list, whatever its type says
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler:
                with contextlib.suppress(ValueError, TypeError):  # in another thread, or a handler that is not Python's
                    signal.signal(number, handler)
                said.append(f"the handler of {number.name}")
        return said


def restore_environment(before: Mapping[str, str]) -> None:
    """Put every variable back, save those that JAX sets for itself."""
    for name in {*before, *os.environ}:
        if os.environ.get(name) != before.get(name) and not name.startswith(_WRITTEN_BY_JAX):
            _write(name, before.get(name))


def _write(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _few_settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in _OF_JAX}


def _all_settings() -> dict[str, Any]:
    return {name: value for name, value in jax.config.values.items() if not name.startswith(_WRITTEN_WHILE_LOWERING)}


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return None
