"""Time on the device, by CUPTI through JAX's own profiler of Mosaic GPU; wherever that is not to be had, there is none."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import jax

from ejkernel.bench._program import Program
from ejkernel.errors import in_one_line

_PROFILER = "jax.experimental.mosaic.gpu.profiler"


class DeviceClock:
    """Sums the time of the kernels that a run starts, whoever started them.

    Attributes:
        reason: why there are no times; empty while there are.
    """

    def __init__(self, backend: str) -> None:
        self.reason = "" if backend == "gpu" else f"there is no device clock for {backend}"
        if not self.reason and importlib.util.find_spec(_PROFILER) is None:
            self.reason = "this jaxlib has no CUPTI profiler"

    def samples(self, program: Program, turn: int) -> list[float]:
        """Seconds on the device of one run with each set of arguments, after one run that is not counted; none if unknown."""
        if self.reason:
            return []
        rotating = _Rotating(program, turn)
        try:
            profiler = importlib.import_module(_PROFILER)
            _, found = profiler.Cupti(finalize=True).measure(rotating, iterations=len(program.sets))()
        except Exception as error:  # noqa: BLE001 - an optional instrument; the reason goes to the result and wall time stays
            message = in_one_line(error)
            if "divisible" not in message and "consistent" not in message:
                self.reason = message
            return []
        if found is None:
            return []
        return [1e-3 * float(value) for value in (found if isinstance(found, list) else [found])]


class _Rotating:
    """A program that takes the next set of arguments at every call; to the profiler it is a compiled function.

    The profiler takes what it does not know for a Python function and compiles it; a function with `trace` and `lower` it takes
    as it is (`jax.stages.Wrapped` is a protocol).
    """

    def __init__(self, program: Program, turn: int) -> None:
        self._program = program
        self._turn = turn

    def __call__(self) -> Any:
        arguments = self._program.sets[self._turn % len(self._program.sets)]
        self._turn += 1
        found = self._program.run(*arguments)
        if self._program.wait is not jax.block_until_ready:  # the profiler waits for JAX arrays only
            self._program.wait(found)
        return found

    def trace(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def lower(self, *arguments: Any) -> Any:
        raise NotImplementedError
