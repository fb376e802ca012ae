"""Options as hashable Python values, so that they can be part of the key of a compiled program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.errors import invalid

_DEFAULTS: Mapping[str, Any] = {"causal": False, "normalize_output": True, "return_lse": False, "logits_dtype": jnp.float32}
_PLAIN = (bool, int, float, str, type)


def options_of(**options: Any) -> dict[str, Any]:
    """The options that differ from their defaults, which keeps the key of the compiled program short.

    Lists become tuples, and concrete zero-dimensional arrays Python numbers; traced values are refused later, by name.
    """
    return {
        name: value if isinstance(value, _PLAIN) else _hashable(value)
        for name, value in options.items()
        if value is not None and value is not _DEFAULTS.get(name, options)
    }


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not isinstance(value, Tracer) and value.ndim == 0:
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
