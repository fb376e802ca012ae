"""Score and mask functions over the scores of one tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.flash_attention.score_functions.record import Mapped
from ejkernel_xla._numerics import finite

Pull = Callable[[Any], tuple[Any, Any]]
"""From the gradients of results to those of the scores and of `mod_values`."""


def with_pull(mapped: Mapped, score: Any) -> tuple[Any, Callable[[Any], Pull]]:
    """The results, and the way back; what no query sees has no gradient, be the function's own NaN there.

    Args:
        mapped: the function of a tile.
        score: the scores before it.

    Returns:
        The results, and a function from the visible places, bool that broadcasts against them, to their `Pull`.
    """
    values = mapped.arrays.get("values")
    if mapped.function.single_loads:
        return _by_loads(mapped, score, values)
    result = mapped(score)
    _, pull = jax.vjp(mapped.with_values, score, None if values is None else finite(values))

    def of(visible: Any) -> Pull:
        def back(gradient: Any) -> tuple[Any, Any]:
            d_score, d_values = pull(jnp.where(visible, gradient, 0))
            return jnp.where(visible, d_score, 0), d_values

        return back

    return result, of


def _by_loads(mapped: Mapped, score: Any, values: Any) -> tuple[Any, Callable[[Any], Pull]]:
    """The gradients of elements are masked score by score, before those of one element are added up."""
    loads, pull_loads = jax.vjp(mapped.loads, values)
    result, pull = jax.vjp(mapped.computed, score, loads)

    def of(visible: Any) -> Pull:
        def back(gradient: Any) -> tuple[Any, Any]:
            d_score, d_loads = pull(jnp.where(visible, gradient, 0))
            seen = tuple(load if load.dtype == jax.dtypes.float0 else jnp.where(visible, load, 0) for load in d_loads)
            return jnp.where(visible, d_score, 0), pull_loads(seen)[0]

        return back

    return result, of
