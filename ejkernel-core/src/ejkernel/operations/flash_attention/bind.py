"""Checks and normal forms of the arguments of `flash_attention`, other than its masks."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import EjkernelWarning, invalid, wrong_type
from ejkernel.operations.flash_attention import dropout
from ejkernel.utils.checks import check_array
from ejkernel.utils.dtypes import accumulator, multiplied
from ejkernel.utils.tracing import is_traced, refuse_traced, traced_number
from ejkernel.utils.warn_once import warn_once

_LOGITS_DTYPES = ("bfloat16", "float16", "float32", "float64")
_PRECISIONS = ("default", "high", "highest")


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


def as_number(name: str, value: Any) -> float:
    """A Python float of a number that is known when the program is built."""
    refuse_traced(name, value, "a number known when the program is built")
    if isinstance(value, (bool, str)) or value is None or getattr(value, "shape", ()) != ():
        raise wrong_type(name, repr(value), "a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong_type(name, repr(value), "a number") from None
    if not math.isfinite(number):
        raise invalid(name, number, "a finite number")
    return number


def as_scale(value: Any, head_size: int) -> float:
    """The factor on `query . key`; None means `1 / sqrt(D)`."""
    return 1 / math.sqrt(head_size) if value is None else as_number("softmax_scale", value)


def scaled(query: Any, value: Any, head_size: int, name: str = "softmax_scale") -> tuple[Any, float]:
    """The query and the static factor on `query . key`. Of a traced factor, the query takes what differs from `1 / sqrt(D)`.

    It is multiplied in float32 and rounded to its dtype again. What is not finite stays as it is and has no part in the factor's
    gradient, so that padding may hold NaN.
    """
    if not is_traced(value):
        return query, as_scale(value, head_size)
    default = as_scale(None, head_size)
    wide = accumulator(query.dtype)
    return multiplied(query, traced_number(name, value, wide) / default), default


def as_soft_cap(value: Any) -> float | None:
    """A cap > 0 or None."""
    if value is None:
        return None
    cap = as_number("logits_soft_cap", value)
    if cap <= 0:
        raise invalid("logits_soft_cap", cap, "a value > 0, or None for no cap")
    return cap


def as_dropout_rate(value: Any) -> float:
    """A probability in [0, 1)."""
    rate = as_number("dropout_prob", value)
    if not 0 <= rate < 1:
        raise invalid("dropout_prob", rate, "a value in [0, 1)")
    return rate


def as_count(name: str, value: Any, least: int) -> int:
    """An int of at least `least`."""
    refuse_traced(name, value, "an int known when the program is built")
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise wrong_type(name, repr(value), "an int known when the program is built") from None
    if count < least:
        raise invalid(name, count, f"a value >= {least}")
    return count


def as_flag(name: str, value: Any) -> bool:
    """True or False."""
    refuse_traced(name, value, "True or False, known when the program is built")
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, repr(value), "True or False")
    return bool(value)


def as_precision(value: Any) -> str | None:
    """None, `"default"`, `"high"` or `"highest"`, from those or a `jax.lax.Precision`."""
    if value is None:
        return None
    name = value.name if isinstance(value, jax.lax.Precision) else value
    if not isinstance(name, str):
        raise wrong_type("precision", repr(value), "None, a jax.lax.Precision or its name")
    if name.lower() not in _PRECISIONS:
        raise invalid("precision", repr(value), f"None or one of {', '.join(_PRECISIONS)}")
    return name.lower()


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


def host_seed(seed: Any) -> Any:
    """A Python int seed as two uint32 words in NumPy, so that another seed is no other program; arrays as they are."""
    if isinstance(seed, (bool, float, complex, str)):
        raise wrong_type("dropout_seed", repr(seed), "an int, an integer scalar or a jax PRNG key")
    if isinstance(seed, int):
        if not 0 <= seed < 2**64:
            raise invalid("dropout_seed", seed, "a value in [0, 2**64)")
        return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return seed


def seed_words(seed: Any) -> Any:
    """The two uint32 words of a seed: an int, an integer scalar, a raw key `uint32[2]` or a typed PRNG key.

    Integer scalars fill the first word; 0 is the second. Longer keys are mixed into two words.
    """
    seed = host_seed(seed)
    if not hasattr(seed, "dtype") or not hasattr(seed, "shape"):
        raise wrong_type("dropout_seed", repr(seed), "an int, an integer scalar or a jax PRNG key")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.shape:
            raise invalid("dropout_seed", f"keys of shape {seed.shape}", "one key")
        seed = jax.random.key_data(seed)
    if not jnp.issubdtype(seed.dtype, jnp.integer):
        raise wrong_type("dropout_seed", f"dtype {seed.dtype}", "an integer type or a jax PRNG key")
    if seed.shape in ((), (1,)):
        return jnp.stack([jnp.asarray(seed).reshape(()).astype(jnp.uint32), jnp.uint32(0)])
    if seed.dtype != np.uint32 or seed.shape not in ((2,), (4,)):
        raise invalid("dropout_seed", f"{seed.dtype} of shape {seed.shape}", "a scalar, or a raw key uint32[2] or uint32[4]")
    return dropout.mix(seed[:2]) ^ seed[2:] if seed.shape == (4,) else jnp.asarray(seed)


def dropout_streams(rate: float, seed: Any, batch: int, heads: int, *, same: bool = False) -> Any:
    """The streams `[B, H, 2]` of a seed, with `same` one for all; None without dropout; seed 0 with one warning without a seed."""
    words = None if seed is None else seed_words(seed)  # checked where nothing is dropped, too
    if not rate:
        return None
    if words is None:
        remedy = "pass a seed or a PRNG key"
        warn_once("dropout_prob", f"without dropout_seed it drops the same entries at every call; {remedy}", EjkernelWarning)
        words = seed_words(0)
    if same:
        return jnp.broadcast_to(dropout.streams(words, 1, 1), (batch, heads, 2))
    return dropout.streams(words, batch, heads)


def check_dropout_streams(streams: Any, batch: int, heads: int) -> None:
    """Refuse streams that are not uint32 `[B, H, 2]`."""
    if tuple(streams.shape) != (batch, heads, 2) or streams.dtype != np.uint32:
        raise invalid(
            "dropout_streams", f"{streams.dtype} of shape {tuple(streams.shape)}", f"uint32 of shape {(batch, heads, 2)}"
        )
