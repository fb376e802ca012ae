"""Step sizes of state-space models."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.call.arrays import statistics_dtype
from ejkernel.utils.checks import check_compute, check_shape


def step_sizes(dt: Any, dt_bias: Any, dt_softplus: bool, x: Any, meaning: str) -> Any:
    """The step sizes `[B,T,I or H]` in float32, or as they are where there is nothing to do."""
    if dt_bias is not None:
        check_compute("dt_bias", dt_bias)
        check_shape("dt_bias", dt_bias, dt.shape[2:], f"[{meaning}]")
    elif not dt_softplus:
        return dt
    steps = dt.astype(statistics_dtype(str(x.dtype)))
    steps = steps if dt_bias is None else steps + dt_bias.astype(steps.dtype)[None, None]
    return jax.nn.softplus(steps) if dt_softplus else steps
