"""Pallas's TPU interpreter as tests of kernels want it."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def interpreted(**options: Any) -> Any:
    """A context in which kernels are interpreted; memory that nothing has written holds NaN."""
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", **options))
