"""Kernels are compiled by threads while JAX still traces the program that calls them.

Triton leaves Python for most of a compilation, so that on several cores the kernels of a program take as long as the longest.
A thread lowers a program of one kernel, which leaves the compiled kernel in jax-triton's memory and in the cache on disk. The
program that is lowered later finds it there, waits for the thread that compiles it, or compiles it if none has begun.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

_MOST_THREADS = 8


def compile_ahead(call: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Begin to compile the kernel that `call(*inputs)` runs; what it raises will be raised where the program is lowered.

    Args:
        call: binds one kernel.
        inputs: its arrays, of which shapes and dtypes are read, and integers.
    """
    _threads().submit(
        _lower, call, [value if isinstance(value, int) else jax.ShapeDtypeStruct(value.shape, value.dtype) for value in inputs]
    )


@functools.cache
def _threads() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ejkernel-triton")


def _lower(call: Callable[..., Any], inputs: Sequence[Any]) -> None:
    def alone(arrays: Sequence[jax.Array]) -> Any:
        remaining = iter(arrays)
        return call(*(value if isinstance(value, int) else next(remaining) for value in inputs))

    specs = [value for value in inputs if not isinstance(value, int)]
    jax.jit(alone).trace(specs).lower(lowering_platforms=("cuda",))
