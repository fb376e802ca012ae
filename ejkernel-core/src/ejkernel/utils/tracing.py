"""Is a program being traced, and is a value part of what it computes?"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ejkernel.errors import invalid, wrong_type

STATIC_REMEDY = "mark it static in jax.jit, or choose between values with jax.lax.switch"


def is_tracing() -> bool:
    """Whether JAX traces in this thread, be it eagerly: under `grad`, `jvp` or `vmap` alone new arrays are no tracers."""
    from jax.extend.core import find_top_trace  # imports Pallas, see `_plugins/early_imports.py`

    return type(find_top_trace(())).__name__ != "EvalTrace"


def is_traced(value: Any) -> bool:
    """Whether a setting is a value that only the running program knows; `explain` may be given its shape instead."""
    return isinstance(value, (Tracer, jax.ShapeDtypeStruct))


def has_traced(value: Any) -> bool:
    """The same for a setting that may be a pair, such as a window."""
    if isinstance(value, (tuple, list)):
        return any(map(is_traced, cast("tuple[Any, ...]", value)))
    return is_traced(value)


def refuse_traced(
    name: str, value: Any, expected: str = "a Python value known when the program is built", *, remedy: str = STATIC_REMEDY
) -> None:
    """Refuse a traced value where a static one is needed.

    Raises:
        TypeError: it is traced.
    """
    if is_traced(value):
        raise wrong_type(name, "a traced value", expected, remedy=remedy)


def traced_count(name: str, value: Any, least: int) -> Any:
    """A traced integer scalar as int32 in `[least, 2**31)`: what is outside counts as the nearest end."""
    _check_scalar(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise wrong_type(name, f"a traced value of dtype {value.dtype}", "an integer type")
    info = jnp.iinfo(value.dtype)
    ends = (max(least, info.min), min(2**31 - 1, info.max))
    return jnp.clip(value.reshape(()), *(jnp.asarray(end, value.dtype) for end in ends)).astype(jnp.int32)


def traced_number(name: str, value: Any, dtype: Any) -> Any:
    """A traced real scalar in this dtype."""
    _check_scalar(name, value)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise wrong_type(name, f"a traced value of dtype {value.dtype}", "a real number")
    return value.reshape(()).astype(dtype)


def _check_scalar(name: str, value: Any) -> None:
    if value.shape not in ((), (1,)):
        raise invalid(
            name, f"a traced value of shape {tuple(value.shape)}", "a scalar", remedy="use jax.vmap for several values"
        )


def without_gradient(name: str, value: Any) -> Any:
    """A traced setting by which nothing is differentiated: a gradient is refused instead of being 0.

    Raises:
        TypeError: it is differentiated.
    """
    return _undifferentiated(name, value)


def _same(name: str, value: Any) -> Any:
    return value


def _refuse_gradient(name: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{name}: it has no gradient; pass jax.lax.stop_gradient({name}), or differentiate by other arguments only")


_undifferentiated = jax.custom_jvp(_same, nondiff_argnums=(0,))
_undifferentiated.defjvp(_refuse_gradient)
