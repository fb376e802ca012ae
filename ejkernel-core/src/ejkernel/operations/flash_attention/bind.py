"""Checks and normal forms of the arguments of `flash_attention`, other than its masks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_array

_LOGITS_DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_query_key_value(query: Any, key: Any, value: Any) -> None:
    """Refuse arrays that do not fit together as `[B, T, H, D]`, `[B, S, K, D]` and `[B, S, K, V]`."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_array(name, array, ndim=4)
    _widest(query, key, value)
    for name, array in (("key", key), ("value", value)):
        if array.shape[0] != query.shape[0]:
            raise invalid(
                name,
                f"batch size {array.shape[0]}",
                f"the query's {query.shape[0]}",
                remedy="batches are never broadcast; use jnp.broadcast_to if that is meant",
            )
    if query.dtype.itemsize == 1:
        raise wrong_type("query", f"dtype {query.dtype}", "float16, bfloat16, float32 or float64")
    for axis, meaning in ((1, "length"), (2, "number of heads")):
        if value.shape[axis] != key.shape[axis]:
            raise invalid("value", f"{meaning} {value.shape[axis]}", f"the key's {key.shape[axis]}")
    if key.shape[3] != query.shape[3]:
        raise invalid("key", f"head size {key.shape[3]}", f"the query's {query.shape[3]}")
    heads, key_heads = query.shape[2], key.shape[2]
    if key_heads == 0 or heads == 0 or heads % key_heads:
        raise invalid("query", f"{heads} heads", f"a multiple of the {key_heads} key heads")
    if query.shape[3] == 0 or value.shape[3] == 0:
        raise invalid("query" if query.shape[3] == 0 else "value", "head size 0", "a head size of at least 1")


def _widest(query: Any, key: Any, value: Any) -> Any:
    """The dtype among the three that holds the numbers of the others exactly."""
    widest = max((array.dtype for array in (query, key, value)), key=lambda dtype: dtype.itemsize)
    for name, array in (("key", key), ("value", value), ("query", query)):
        small = array.dtype.itemsize == 1 and array.dtype != query.dtype
        if small or (array.dtype != widest and array.dtype.itemsize == widest.itemsize):
            other = widest if name == "query" else query.dtype
            expected = f"the {'key' if name == 'query' else 'query'}'s dtype {other}, or float32 in one of them"
            raise wrong_type(name, f"dtype {array.dtype}", expected, remedy="cast one of them")
    return widest


def in_one_dtype(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The three in the widest of their dtypes, which holds the numbers of the others exactly; they are checked."""
    widest = _widest(query, key, value)
    query, key, value = (x if x.dtype == widest else x.astype(widest) for x in (query, key, value))
    return query, key, value


def as_score_shaped(name: str, array: Any, sizes: tuple[int, int, int, int]) -> Any:
    """A bias or mask as `[B|1, H|1, T|1, S|1]`; two axes mean `[T, S]`."""
    check_array(name, array, floating=False)
    meaning = f"[B or 1, H or 1, T or 1, S or 1] with (B, H, T, S) = {sizes}, or [T or 1, S or 1]"
    shape = tuple(array.shape)
    if len(shape) not in (2, 4) or any(a not in (1, b) for a, b in zip(shape[::-1], sizes[::-1], strict=False)):
        raise invalid(name, f"shape {shape}", meaning)
    return array[None, None] if len(shape) == 2 else array


def as_bias(array: Any, sizes: tuple[int, int, int, int]) -> Any:
    """The bias, checked, with four axes."""
    shaped = as_score_shaped("bias", array, sizes)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise wrong_type("bias", f"dtype {array.dtype}", "a floating type", remedy="a boolean mask belongs in mask_info")
    return shaped


def as_sinks(array: Any, heads: int) -> Any:
    """Sinks `[H]`, `[H, n]` or `[1, n]` as `[1, H, n]`; None when there are none of them."""
    if array is None:
        return None
    check_array("softmax_aux", array)
    shape = tuple(array.shape)
    if shape == (heads,):
        return array[None, :, None]
    if len(shape) == 2 and shape[0] in (1, heads):
        return jnp.broadcast_to(array, (heads, shape[1]))[None] if shape[1] else None
    raise invalid("softmax_aux", f"shape {shape}", f"[H], [H, n] or [1, n] with H = {heads} query heads")


def as_logits_dtype(value: Any, inputs_dtype: Any) -> str:
    """The dtype's name. "float32" means no rounding beyond the accumulator's, which is float64 for float64 inputs."""
    try:
        name = jnp.dtype("float32" if value is None else value).name
    except TypeError:
        name = repr(value)
    if name not in _LOGITS_DTYPES:
        raise invalid("logits_dtype", name, f"one of {', '.join(_LOGITS_DTYPES)}")
    if name == "float64" and inputs_dtype != jnp.float64:
        raise invalid("logits_dtype", name, f"at most float32 for {inputs_dtype} inputs")
    return "float64" if name == "float32" and inputs_dtype == jnp.float64 else name
