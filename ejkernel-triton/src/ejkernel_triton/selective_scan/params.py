"""What the kernels are compiled for, as one constant."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton.selective_scan.config import Config


@dataclasses.dataclass(frozen=True)
class Params:
    """Static facts of a call and its config.

    Attributes:
        channels, width: I and N.
        block_n: a power of two from width on.
        num_warps: warps of a program.
        whole: whether segments and chunks have no tails.
        rates_per_member, skip_per_member: whether every member of the batch has its own.
        skip: whether there is D.
        cut: whether sequences may end inside of rows; see `edges`.
        packed: whether states are of packed sequences.
        x_holds, dt_holds: numbers that the gradient of x, of dt, holds before it is written, per element; see `tiles.held_of`.
    """

    channels: int
    width: int
    block_i: int
    block_n: int
    chunk_size: int
    segment_size: int
    num_warps: int
    whole: bool
    rates_per_member: bool
    skip_per_member: bool
    skip: bool
    cut: bool
    packed: bool
    x_holds: int
    dt_holds: int

    @property
    def rest(self) -> int:
        """Arrays that hold states beside the gradients of x and dt."""
        return max(-(-self.width // self.chunk_size) - self.x_holds - (self.dt_holds > 0), 0)

    @property
    def square(self) -> int:
        """Channels, and numbers of a state, that are transposed in `tiles.held_of`."""
        return 4 if self.channels % 4 == 0 and self.chunk_size % 4 == 0 and self.block_i % 4 == 0 else 1

    @property
    def warp_rows(self) -> int:
        """Channels that a warp holds side by side, four numbers of a state per thread, as Triton lays a tile out."""
        return min(max(128 // self.block_n, 1), 32, self.block_i // self.num_warps)


def held_dtype(call: SelectiveScanCall) -> Any:
    """Of states and partial sums that a kernel leaves for the next one."""
    return jnp.dtype(jnp.bfloat16 if call.x.dtype == "bfloat16" else jnp.float32)


def params_of(call: SelectiveScanCall, config: Config) -> Params:
    length = call.x.shape[1]
    held = held_dtype(call)
    segment = config.segment_size or -(-length // config.chunk_size) * config.chunk_size
    return Params(
        channels=call.x.shape[2],
        width=call.A.shape[2],
        block_i=config.block_i,
        block_n=next_power_of_2(call.A.shape[2]),
        chunk_size=config.chunk_size,
        segment_size=segment,
        num_warps=config.num_warps,
        whole=length % segment == 0,
        rates_per_member=call.A.shape[0] > 1,
        skip_per_member=call.D is not None and call.D.shape[0] > 1,
        skip=call.D is not None,
        cut=call.resets is not None or call.cu_seqlens is not None,
        packed=call.cu_seqlens is not None,
        x_holds=jnp.dtype(call.x.dtype).itemsize // held.itemsize,
        dt_holds=jnp.dtype(call.dt.dtype).itemsize // held.itemsize,
    )
