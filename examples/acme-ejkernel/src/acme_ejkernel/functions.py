"""The public functions of our own operations."""

from __future__ import annotations

from typing import Any

import jax

from acme_ejkernel.operations.log_sum_exp.interface import OPERATION as _LOG_SUM_EXP
from ejkernel.operation import public

__all__ = ["log_sum_exp"]


@public()
def log_sum_exp(
    x: jax.Array, *, scale: float = 1.0, platform: str | tuple[str, ...] | None = None, cfg: Any = None
) -> jax.Array:
    """Logarithm of the sum of the exponentials of each row.

    Args:
        x: `[B, D]`, D at least 1.
        scale: factor of x.
        platform: which platform runs it; None lets the dispatcher choose.
        cfg: config of the chosen implementation.

    Returns:
        `[B]` in the dtype of x, summed in float32.

    Raises:
        ValueError: x has another number of dimensions, or its rows no elements.
    """
    return _LOG_SUM_EXP.invoke({"x": x}, {"scale": scale}, platform=platform, cfg=cfg)
