"""Logits and visibility mask of a tile, inside a kernel.

Scores are transposed, `[BK, BQ]`: a query is a lane, so maxima and sums of rows reduce over sublanes without cross-lane moves,
and statistics of queries are single rows `[1, BQ]`. Token info of keys is loaded as rows too and transposed to columns `[BK,
1]` here. Logits are base-2 exponents.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel_pallas.tpu._vmem import LANES, block_bytes

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
MASK_VALUE = -0.7 * 3.4028235e38
"""Value of masked logits: finite, so that differences of two are finite."""
TOKEN_INFO_ROWS = 8
"""Rows of the int32 token info arrays: position, segment, chunk."""


def precision_of(call: FlashAttentionCall) -> Any:
    """Precision of matmuls of the inputs: full float32 unless the call asks for less; narrower dtypes are exact."""
    if call.query.dtype != "float32" or call.precision == "default":
        return jax.lax.Precision.DEFAULT
    return jax.lax.Precision.HIGHEST


def product(a: Any, b: Any, axes: tuple[int, int], precision: Any) -> Any:
    """Contract one axis of each, in float32."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def column(row: Any) -> Any:
    """`[1, N]` as `[N, 1]`, N a multiple of 128."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))[:, :1]


@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """Row indices in the token info arrays; -1 if absent. Queries and keys use the same rows.

    Attributes:
        position: replaces the index in causal and window masks.
        segment: equal ones see each other; padding has another number on either side.
        chunk: likewise.
    """

    position: int = -1
    segment: int = -1
    chunk: int = -1

    @property
    def count(self) -> int:
        return sum(row >= 0 for row in dataclasses.astuple(self))


def token_info_of(call: FlashAttentionCall) -> TokenInfo:
    positional = call.causal or call.window is not None
    given = call.query_positions is not None or call.key_positions is not None
    wanted = {
        "position": given and positional,
        "segment": call.query_segments is not None,
        "chunk": call.chunk_size is not None,
    }
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    return TokenInfo(**{name: row for row, name in enumerate(names)})


def token_info_arrays(call: FlashAttentionCall, inputs: FlashAttentionInputs, queries: int, keys: int) -> tuple[Any, ...]:
    """Token info of queries and keys, int32 `[b|1, 8, queries]` and `[b|1, 8, keys]`; empty if indices suffice."""
    info = token_info_of(call)
    if not info.count:
        return ()
    sides = (
        (inputs.query_positions, inputs.query_segments, call.query.shape[1], queries, call.query_offset, -1),
        (inputs.key_positions, inputs.key_segments, call.key.shape[1], keys, 0, -2),
    )
    return tuple(_side(call, info, *side) for side in sides)


def _side(
    call: FlashAttentionCall,
    info: TokenInfo,
    positions: Any,
    segments: Any,
    length: int,
    padded: int,
    offset: int,
    padding: int,
) -> Any:
    position = jnp.arange(length, dtype=jnp.int32)[None] + offset if positions is None else positions
    rows: list[Any] = []
    if info.position >= 0:
        rows.append(position)
    if info.segment >= 0:
        rows.append(jnp.where(segments < 0, padding, segments))
    if call.chunk_size is not None:
        rows.append(position // call.chunk_size)
    batch = max(row.shape[0] for row in rows)
    rows = [jnp.broadcast_to(row, (batch, length)) for row in rows]
    stacked = jnp.stack([*rows, *[jnp.zeros_like(rows[0])] * (TOKEN_INFO_ROWS - len(rows))], axis=1)
    return jnp.pad(stacked, ((0, 0), (0, 0), (0, padded - length)))


@dataclasses.dataclass(frozen=True)
class Scores:
    """A `[b|1, h|1, t|1, s|1]` array, and the form in which a kernel reads it.

    Attributes:
        batched, headed, queried, keyed: the axes along which it varies. Without `keyed` it is read as a row of queries.
    """

    batched: bool
    headed: bool
    queried: bool
    keyed: bool

    @classmethod
    def of(cls, spec: Any) -> Scores:
        return cls(*(size > 1 for size in spec.shape))

    def block(self, block_q: int, block_k: int) -> tuple[int, int]:
        if not self.keyed:
            return 1, block_q
        return (block_q if self.queried else 1), block_k

    def place(self, batch: Any, head: Any, i_query: Any, i_key: Any) -> tuple[Any, Any, Any, Any]:
        outer = (batch if self.batched else 0, head if self.headed else 0)
        if not self.keyed:
            return *outer, 0, i_query
        return *outer, i_query if self.queried else 0, i_key

    def stored(self, array: Any, queries: int, keys: int) -> Any:
        """Padded to these lengths, a single column as a row, bools as bytes."""
        array = array.astype(jnp.int8) if array.dtype == jnp.bool_ else array
        if not self.keyed:
            array = jnp.swapaxes(array, 2, 3)
            length = queries
            if not self.queried:
                return jnp.broadcast_to(array, (*array.shape[:3], length))
            return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, length - array.shape[3])))
        rows = queries - array.shape[2] if self.queried else 0
        return jnp.pad(array, ((0, 0), (0, 0), (0, rows), (0, keys - array.shape[3])))

    def read(self, ref: Any, start: int, size: int) -> Any:
        """Keys start ... start + size of the block, to be combined with `[BK, BQ]`, in 32 bits."""
        wide = jnp.int32 if ref.dtype == jnp.int8 else jnp.float32
        if not self.keyed:
            return ref[...].astype(wide)
        part = ref[:, pl.ds(start, size)].astype(wide)
        return jnp.transpose(part) if self.queried else column(part)

    def bytes(self, dtype: str, block_q: int, block_k: int) -> int:
        return block_bytes(self.block(block_q, block_k), "int8" if dtype == "bool" else dtype)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile that a kernel processes.

    Attributes:
        call: of the operation.
        i_query, i_key: indices of its blocks.
        block_q, block_k: their sizes.
        head: index of its head, over all batches.
        query_info, key_info, bias, mask, streams: references, None if absent.
    """

    call: FlashAttentionCall
    i_query: Any
    i_key: Any
    block_q: int
    block_k: int
    head: Any
    query_info: Any = None
    key_info: Any = None
    bias: Any = None
    mask: Any = None
    streams: Any = None

    def logits(self, qk: Any, start: int) -> tuple[Any, Any, Any]:
        """Of `key . query` `[size, BQ]` for the keys from `start` of the block: logits, the slope of the cap or None, the bias."""
        call = self.call
        if call.logits_dtype != "float32":
            qk = qk.astype(call.logits_dtype).astype(jnp.float32)
        bias = None if self.bias is None or call.bias is None else Scores.of(call.bias).read(self.bias, start, qk.shape[0])
        if call.logits_soft_cap is None:
            logits = qk * (call.softmax_scale * LOG2_E)
            return (logits if bias is None else logits + bias * LOG2_E), None, bias
        logits = qk * (call.softmax_scale / call.logits_soft_cap)
        logits = jnp.tanh(logits if bias is None else logits + bias * (1 / call.logits_soft_cap))
        return logits * (call.logits_soft_cap * LOG2_E), 1.0 - logits * logits, bias

    def visible(self, shape: tuple[int, int], start: int, bias: Any, *, queries_end: bool) -> Any:
        """Visibility mask, bool `[size, BQ]`. With `queries_end`, queries past the end are masked."""
        call, info = self.call, token_info_of(self.call)
        key = jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0) + (self.i_key * self.block_k + start)
        query = jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + self.i_query * self.block_q
        keys = call.key.shape[1]
        visible = key < (
            jnp.where(query < call.query.shape[1], keys, 0) if queries_end else jnp.full(query.shape, keys, jnp.int32)
        )
        if info.position >= 0:
            query, key = self._token_info(info.position, start, shape[0])
        elif call.query_offset:
            query = query + call.query_offset
        if call.causal:
            visible = visible & (key <= (jnp.maximum(query, call.prefix - 1) if call.prefix else query))
        left, right = call.window or (None, None)
        visible = visible if left is None else visible & (query - key <= left)
        visible = visible if right is None else visible & (key - query <= right)
        for row in (info.segment, info.chunk):
            if row >= 0:
                own, other = self._token_info(row, start, shape[0])
                visible = visible & (own == other)
        if self.mask is not None and call.mask is not None:
            visible = visible & (Scores.of(call.mask).read(self.mask, start, shape[0]) != 0)
        return visible if bias is None else visible & (bias != -jnp.inf)

    def dropout_factor(self, shape: tuple[int, ...], start: int) -> Any:
        """Dropout factor of each weight `[size, BQ]`, 0 or the keep scale; None without dropout."""
        if self.streams is None or not self.call.dropout_rate:
            return None
        key = jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0) + (self.i_key * self.block_k + start)
        query = jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + self.i_query * self.block_q
        stream_0, stream_1 = (self.streams[2 * self.head + index].astype(jnp.uint32) for index in range(2))
        random = dropout.bits(stream_0, stream_1, query.astype(jnp.uint32), key.astype(jnp.uint32))
        return jnp.where(random < dropout.threshold(self.call.dropout_rate), 0.0, 1.0 / (1.0 - self.call.dropout_rate))

    def _token_info(self, row: int, start: int, size: int) -> tuple[Any, Any]:
        """Token info of the queries `[1, BQ]` and of the keys `[size, 1]`."""
        return self.query_info[row : row + 1, :], column(self.key_info[row : row + 1, pl.ds(start, size)])
