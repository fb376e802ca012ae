"""What every `pallas_call` here needs."""

from __future__ import annotations

from typing import Any

import jax


def result_like(array: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result that varies over the same manual mesh axes as an operand, as `shard_map` wants to be told."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)  # pyright: ignore
