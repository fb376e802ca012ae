"""Dtypes by name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.errors import invalid


def dtype_name(name: str, dtype: Any) -> str:
    """The name of a floating dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise invalid(name, repr(dtype), "a floating dtype") from None
    if not jnp.issubdtype(found, jnp.floating):
        raise invalid(name, found.name, "a floating dtype")
    return found.name
