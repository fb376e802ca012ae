"""Layout of a bias, and sizes of its tiles in shared memory; `bias_loads` loads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel_pallas.mosaic_gpu._device import smem_bytes
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import ROWS

_DTYPES = ("float32", "bfloat16", "float16")
_ROW_TOKENS, _COLUMN_TOKENS = 8, 64
"""Rows and columns of the TMA box of a pairwise bias are multiples of these."""


@dataclasses.dataclass(frozen=True)
class BiasTiles:
    """A ring buffer of bias tiles, for kernels whose consumers own `ROWS` tokens each and loop over tiles of others.

    Attributes:
        kind: "pairs", or "keys" or "queries" for a bias that is broadcast over the other axis.
        batch, heads: of the bias, 1 if it is shared.
        dtype: in memory.
        by_key: whether keys are owned, not queries.
        warpgroups: consumers of a block.
        other: tokens of a streamed tile.
        num_stages: tiles in shared memory.
    """

    kind: str
    batch: int
    heads: int
    dtype: str
    by_key: bool
    warpgroups: int
    other: int
    num_stages: int

    @property
    def by_pair(self) -> bool:
        return self.kind == "pairs"

    @property
    def transposed(self) -> bool:
        """Whether pairwise tiles are stored as `[other, own]`: loads can transpose 16-bit elements of shared memory."""
        return self.by_pair and self.by_key and jnp.dtype(self.dtype).itemsize == 2

    @property
    def owned(self) -> bool:
        """Whether it is a row bias over the owned tokens."""
        return self.kind == ("keys" if self.by_key else "queries")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tile."""
        if self.by_pair:
            return (self.warpgroups, self.other, ROWS) if self.transposed else (self.warpgroups, ROWS, self.other)
        return (self.warpgroups * ROWS,) if self.owned else (self.other,)

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return smem_bytes((self.num_stages, *self.shape), jnp.dtype(self.dtype).itemsize)

    @property
    def registers(self) -> int:
        """Registers per consumer thread of a loaded tile."""
        if self.by_pair:
            return self.other * jnp.dtype(self.dtype).itemsize // 8
        return 2 if self.owned else self.other // 4

    @property
    def copies(self) -> int:
        """Of a tile."""
        return self.warpgroups if self.by_pair else 1

    def stored(self, bias: Any, queries: int, keys: int) -> Any:
        """The bias as TMA loads it: `[batch * heads, T, S]`, or `[batch * heads, n]` padded to whole tiles."""
        rows = self.batch * self.heads
        bias = bias.astype(self.dtype)
        if not self.by_pair:
            length = keys if self.kind == "keys" else queries
            bias = jnp.broadcast_to(bias.reshape(rows, -1), (rows, length))
            return jnp.pad(bias, ((0, 0), (0, -length % self.shape[0])))
        bias = bias.reshape(rows, queries, keys)
        if self.by_key and not self.transposed:
            bias = jnp.swapaxes(bias, 1, 2)
        extra = (-bias.shape[1] % _ROW_TOKENS, -bias.shape[2] % _COLUMN_TOKENS)
        return jnp.pad(bias, ((0, 0), *((0, more) for more in extra))) if any(extra) else bias

    def row(self, i_batch: Any, i_head: Any) -> Any:
        """Row index into the result of `stored`."""
        i_batch, i_head = i_batch if self.batch > 1 else 0, i_head if self.heads > 1 else 0
        return i_batch * self.heads + i_head


def bias_kind(call: FlashAttentionCall) -> str | None:
    """The kind of a call's bias. A bias that is equal for all pairs counts as a row of keys."""
    if call.bias is None:
        return None
    _, _, queries, keys = call.bias.shape
    return "keys" if queries == 1 else "queries" if keys == 1 else "pairs"


def bias_tiles(call: FlashAttentionCall, *, by_key: bool, warpgroups: int, other: int, num_stages: int) -> BiasTiles | None:
    kind = bias_kind(call)
    if call.bias is None or kind is None:
        return None
    batch, heads, _, _ = call.bias.shape
    dtype = call.bias.dtype if kind == "pairs" and call.bias.dtype in _DTYPES else "float32"
    return BiasTiles(kind, batch, heads, dtype, by_key, warpgroups, other, num_stages)
