"""Options as hashable Python values, so that they can be part of the key of a compiled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid


def options_of(**options: Any) -> dict[str, Any]:
    """Lists become tuples, and concrete zero-dimensional arrays Python numbers; traced values are refused later, by name."""
    return {
        name: value if value is None or isinstance(value, _PLAIN) else _hashable(value) for name, value in options.items()
    }


_PLAIN = (bool, int, float, str, type)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not isinstance(value, jax.core.Tracer) and value.ndim == 0:
        return value.item()
    return value


def dtype_name(name: str, dtype: Any) -> str:
    """The name of a floating dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        raise invalid(name, repr(dtype), "a floating dtype") from None
    if not jnp.issubdtype(found, jnp.floating):
        raise invalid(name, found.name, "a floating dtype")
    return found.name
