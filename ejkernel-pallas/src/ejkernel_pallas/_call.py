"""What every `pallas_call` here needs."""

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
    """A result that varies over the same manual mesh axes as an operand, as `shard_map` wants to be told."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)  # pyright: ignore


@contextlib.contextmanager
def with_vmem_limits(limits: Mapping[str, int]) -> Generator[None]:
    """Kernels built inside may use so many bytes of VMEM by their names, others 64 KiB: the compiler then says what they need."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


def compiler_params(name: str, semantics: tuple[str, ...], vmem: int) -> pltpu.CompilerParams:
    """For the kernel of this name: what its grid's axes mean to the compiler, and the bytes of VMEM that it may use."""
    limits = _limits.get()
    limit = vmem if limits is None else limits.get(name, MIN_VMEM)
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)  # pyright: ignore[reportArgumentType]


def block_traffic(blocks: Iterable[tuple[tuple[int, ...], Any, int]]) -> int:
    """Bytes between HBM and VMEM: of blocks, each given by its shape, its dtype and how often one is copied."""
    return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize * times for shape, dtype, times in blocks)


def cost_estimate(flops: int, transcendentals: int, accessed: int) -> pl.CostEstimate:
    """What a kernel tells XLA of itself. XLA cannot look inside, and arranges copies and collectives beside it by this."""
    return pl.CostEstimate(flops=int(flops), transcendentals=int(transcendentals), bytes_accessed=int(accessed))
