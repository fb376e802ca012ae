"""Helpers for every `pallas_call` here."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MIN_VMEM = 1 << 16
_limits: contextvars.ContextVar[Mapping[str, int] | None] = contextvars.ContextVar("ejkernel_vmem_limits", default=None)


def result_like(array: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the same manual mesh axes as an operand, as `shard_map` requires."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)  # pyright: ignore


@contextlib.contextmanager
def with_vmem_limits(limits: Mapping[str, int]) -> Generator[None]:
    """Limit the VMEM of kernels built inside the block, by name; others get 64 KiB, so that the compiler reports what they
    need."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


def compiler_params(name: str, semantics: tuple[str, ...], vmem: int) -> pltpu.CompilerParams:
    """Compiler parameters of a kernel: the semantics of its grid axes and its VMEM limit in bytes."""
    limits = _limits.get()
    limit = vmem if limits is None else limits.get(name, MIN_VMEM)
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)  # pyright: ignore[reportArgumentType]


def block_traffic(blocks: Iterable[tuple[tuple[int, ...], Any, int]]) -> int:
    """Bytes copied between HBM and VMEM, from the shape, dtype and copy count of each block."""
    return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize * times for shape, dtype, times in blocks)


def cost_estimate(flops: int, transcendentals: int, accessed: int) -> pl.CostEstimate:
    """A kernel's cost estimate. XLA schedules copies and collectives by it."""
    return pl.CostEstimate(flops=int(flops), transcendentals=int(transcendentals), bytes_accessed=int(accessed))
