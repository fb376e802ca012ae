"""What every `pallas_call` here needs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

_too_little: contextvars.ContextVar[frozenset[str] | None] = contextvars.ContextVar("ejkernel_too_little_vmem", default=None)
_LITTLE = 1 << 16


def result_like(array: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result that varies over the same manual mesh axes as an operand, as `shard_map` wants to be told."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)  # pyright: ignore


@contextlib.contextmanager
def with_too_little_vmem(*, except_for: frozenset[str]) -> Generator[None]:
    """Kernels built inside get 64 KiB of VMEM, so that the compiler refuses them and says how much they need."""
    token = _too_little.set(except_for)
    try:
        yield
    finally:
        _too_little.reset(token)


def compiler_params(name: str, semantics: tuple[str, ...], vmem: int) -> pltpu.CompilerParams:
    """For the kernel of this name: what its grid's axes mean to the compiler, and the bytes of VMEM that it may use."""
    except_for = _too_little.get()
    limit = vmem if except_for is None or name in except_for else _LITTLE
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)  # pyright: ignore[reportArgumentType]
