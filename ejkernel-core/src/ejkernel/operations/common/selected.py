"""Lists of what each query selects: one row of numbers per query, negative where the list has ended."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.errors import wrong_type
from ejkernel.utils.checks import check_array

NOTHING = -1
"""An entry that selects nothing."""


def check_integers(name: str, array: Any, *, ndim: int | None = None) -> None:
    """Refuse what is not an array of integers, or of another rank."""
    check_array(name, array, ndim=ndim, floating=False)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise wrong_type(name, f"dtype {array.dtype}", "integers")


def distinct(selected: Any) -> Any:
    """Every row in ascending order, with repetitions replaced by `NOTHING`."""
    if selected.shape[-1] < 2:
        return selected
    ordered = jnp.sort(selected, axis=-1)
    repeated = jnp.concatenate([jnp.zeros_like(ordered[..., :1], bool), ordered[..., 1:] == ordered[..., :-1]], axis=-1)
    return jnp.where(repeated, NOTHING, ordered)
