"""Integers that int32 does not hold: the nearest end takes their place, not the number that a conversion would wrap them to."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid

_LEAST, _MOST = -(2**31), 2**31 - 1
_PLAIN = frozenset((type(None), bool, int, float, str))
"""What most options are: `isinstance` of `jax.Array` takes ten times as long as a look into a set."""


def as_int32(array: Any) -> Any:
    """Integers of any type as an int32 array; what is beyond an end counts as that end."""
    if not isinstance(array, (jax.Array, np.ndarray)):
        array = np.asarray(array)
    if _is_wide(array.dtype):
        least = max(_LEAST, int(jnp.iinfo(array.dtype).min))
        clip = jnp.clip if isinstance(array, jax.Array) else np.clip
        array = clip(array, *(np.asarray(end, array.dtype) for end in (least, _MOST)))
    return jnp.asarray(array).astype(jnp.int32)


def narrowed(name: str, value: Any) -> Any:
    """An argument as JAX may take it: NumPy integers of 64 bits, which it makes 32 bits of without looking, in int32.

    Raises:
        ValueError: ids of segments that int32 does not hold. What is beyond an end would be one segment.
    """
    if type(value) in _PLAIN or not isinstance(value, (np.ndarray, jax.Array)) or isinstance(value, jax.core.Tracer):
        return value
    if not _is_wide(value.dtype):
        return value
    if "segment" in name or name == "seg_ids":
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return value
        if value.size and not _LEAST <= int(value.min()) <= int(value.max()) <= _MOST:
            raise invalid(name, f"values in [{value.min()}, {value.max()}]", "values that int32 holds")
    if isinstance(value, jax.Array) or value.dtype.itemsize < 8 or "seed" in name or jax.config.jax_enable_x64:
        return value
    return np.asarray(np.clip(value, max(_LEAST, int(np.iinfo(value.dtype).min)), _MOST), np.int32)


@functools.cache
def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and int(jnp.iinfo(dtype).max) > _MOST
