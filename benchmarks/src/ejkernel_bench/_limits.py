"""What the device can do at most, measured: products per dtype, and copying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

_SIDES = {"cpu": (512, 1024), "gpu": (4096, 8192), "tpu": (4096, 8192)}
_COPIED = {"cpu": 2**27, "gpu": 2**30, "tpu": 2**30}
_SECONDS = 0.3


def measure_limits(dtypes: Iterable[str], backend: str) -> dict[str, Any]:
    """The largest rates seen: FLOP/s of square products of each dtype, bytes/s of a copy, read and written."""
    sides = _SIDES.get(backend, _SIDES["gpu"])
    rates = {dtype: max(_product_rate(side, dtype) for side in sides) for dtype in dict.fromkeys(dtypes)}
    size = _COPIED.get(backend, _COPIED["gpu"])
    shapes = " and ".join(f"{side}^3" for side in sides)
    how = f"largest rate seen of products of random {shapes} matrices, and of negating {size >> 20} MiB (read + written)"
    return {"flops_per_s": rates, "bytes_per_s": _copy_rate(size), "how": how}


def _product_rate(side: int, dtype: str) -> float:
    left, right = (jax.random.normal(key, (side, side), jnp.dtype(dtype)) for key in jax.random.split(jax.random.key(0)))
    precision = "highest" if dtype == "float32" else None
    program = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision)).lower(left, right).compile()
    return 2 * side**3 / _fastest(lambda: program(left, right))


def _copy_rate(size: int) -> float:
    array = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    program = jax.jit(jnp.negative).lower(array).compile()
    return 2 * size / _fastest(lambda: program(array))


def _fastest(run: Callable[[], Any]) -> float:
    """Seconds of one of several runs that were started together; the best of many tries."""
    jax.block_until_ready(run())
    best, spent, tries = float("inf"), 0.0, 0
    while spent < _SECONDS or tries < 3:
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(4)])
        took = time.perf_counter() - start
        best, spent, tries = min(best, took / 4), spent + took, tries + 1
    return best
