"""Static mask and logit parameters of a call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
BOUND = 96
"""Largest base-2 exponent of bounded weights; float32 still holds sums of many, times values."""
TOKEN_INFO = ("query_segments", "key_segments", "query_positions", "key_positions")


@dataclasses.dataclass(frozen=True)
class MaskParams:
    """Weights are `2 ** (unit * (x - maximum))`, x made from `query . key` as `capped(raw)`.

    Attributes:
        queries, keys: lengths; indices past them are masked.
        heads, group: query heads, and query heads per key head.
        causal, prefix, left, right, chunk: positional mask; None or 0 if unused.
        offset: position of query 0, unless positions are given.
        token_info: names of the given arrays of segments and positions.
        scale: factor on `query . key`.
        cap: soft cap of the logits, or None.
        approx_tanh: whether the cap's tanh may be off by 2**-11, no more than bfloat16's rounding of operands.
        bias: whether there is one; -inf masks a pair.
        bounded: whether the cap bounds weights so that no running maximum is needed; bfloat16 holds `2 ** unit` and its
            inverse.
    """

    queries: int
    keys: int
    heads: int
    group: int
    causal: bool
    prefix: int
    left: int | None
    right: int | None
    chunk: int
    offset: int
    token_info: tuple[str, ...]
    scale: float
    cap: float | None
    approx_tanh: bool
    bias: bool
    bounded: bool

    @property
    def by_index(self) -> bool:
        """Whether indices alone determine the visited tiles."""
        return not self.token_info

    @property
    def has_mask(self) -> bool:
        """Whether positions or segments may mask some pair of existing tokens."""
        limits = self.left is not None or self.right is not None
        return bool(self.token_info) or self.causal or limits or bool(self.chunk)

    @property
    def has_mask_or_bias(self) -> bool:
        """Whether some pair of existing tokens may be masked."""
        return self.has_mask or self.bias

    @property
    def folds_scale(self) -> bool:
        """Whether the scale is folded into the exponential."""
        return self.cap is None and self.scale > 0 and not self.bias

    @property
    def unit(self) -> float:
        if self.cap is not None:
            return self.cap * LOG2_E
        return self.scale * LOG2_E if self.folds_scale else LOG2_E

    def logits(self, b_qk: Any, b_bias: Any = None) -> Any:
        """Logits of a tile in units of `1 / unit` powers of two: the scores, scaled scores, or a tanh. A bias is added; -inf
        stays -inf."""
        if b_bias is None:
            if self.cap is None:
                return b_qk if self.folds_scale else b_qk * self.scale
            return self._capped(b_qk, self.scale)
        b_logits = b_qk * self.scale + b_bias
        return jnp.where(b_bias == -jnp.inf, -jnp.inf, b_logits if self.cap is None else self._capped(b_logits, 1.0))

    def _capped(self, b_value: Any, scale: float) -> Any:
        assert self.cap is not None
        if self.approx_tanh:
            return jnp.tanh(b_value * (scale / self.cap))
        return 1.0 - 2.0 / (1.0 + jnp.exp2(b_value * (2 * LOG2_E * scale / self.cap)))

    def slope(self, b_logits: Any) -> Any:
        """Derivative of the cap, from the result of `logits`."""
        return 1.0 - b_logits * b_logits

    def key_range(self, first: Any, last: Any, block: int) -> tuple[Any, Any, Any, Any]:
        """Key tile range of queries first ... last: tiles to visit [low, high), and tiles that need no mask [full_low,
        full_high)."""
        (low, full_high), (full_low, high) = self.keys_of(first), self.keys_of(last)
        return _in_tiles(low, full_low, full_high, high, self.keys, block)

    def query_range(self, first: Any, last: Any, block: int) -> tuple[Any, Any, Any, Any]:
        """Query tile range of keys first ... last, likewise."""
        (low, full_high), (full_low, high) = self.queries_of(first), self.queries_of(last)
        return _in_tiles(low, full_low, full_high, high, self.queries, block)

    def keys_of(self, o_query: Any) -> tuple[Any, Any]:
        """Keys [low, high) that a query sees by its index. Both ends are non-decreasing in the index; a constant end is an int."""
        low, high = 0, self.keys
        coord = o_query + self.offset
        if self.causal:
            high = jnp.minimum(high, jnp.maximum(coord + 1, self.prefix))
        if self.right is not None:
            high = jnp.minimum(high, coord + (self.right + 1))
        if self.left is not None:
            low = jnp.maximum(low, coord - self.left)
        if self.chunk:
            start = self._chunk(coord) * self.chunk
            low, high = jnp.maximum(low, start), jnp.minimum(high, start + self.chunk)
        return low, high

    def queries_of(self, o_key: Any) -> tuple[Any, Any]:
        """Queries [low, high) that see a key, likewise. All queries see the prefix."""
        low, high = 0, self.queries
        if self.causal:
            low = jnp.maximum(low, jnp.where(o_key < self.prefix, 0, o_key - self.offset))
        if self.right is not None:
            low = jnp.maximum(low, o_key - (self.right + self.offset))
        if self.left is not None:
            high = jnp.minimum(high, o_key + (self.left - self.offset + 1))
        if self.chunk:
            start = self._chunk(o_key) * self.chunk - self.offset
            low, high = jnp.maximum(low, start), jnp.minimum(high, start + self.chunk)
        return low, high

    @property
    def by_row(self) -> bool:
        """Whether visibility depends on the query's position."""
        placed = "query_positions" in self.token_info or "key_positions" in self.token_info
        return placed or self.causal or self.left is not None or self.right is not None or bool(self.chunk)

    def visible(self, o_row: Any, o_column: Any, token_info: dict[str, Any], *, by_key: bool) -> Any:
        """Visibility mask of a tile. Rows are queries, or keys if `by_key`; rows past the end may count as visible.

        Args:
            o_row: row indices `[rows]`; None unless `by_row`: Mosaic GPU infers no layout for unused values.
            o_column: indices of columns, of the tile's shape.
            token_info: of the tile's shape.
            by_key: see above.
        """

        def spread(rows: Any) -> Any:
            return lax.broadcast_in_dim(rows, o_column.shape, [0])

        if not self.by_row:
            b_visible = o_column < (self.queries if by_key else self.keys)
        elif "query_positions" in token_info or "key_positions" in token_info:
            b_row = spread(o_row)
            b_visible = self._visible_at(*((o_column, b_row) if by_key else (b_row, o_column)), token_info)
        else:
            low, high = self.queries_of(o_row) if by_key else self.keys_of(o_row)
            b_visible = o_column < (high if isinstance(high, int) else spread(high))
            if not isinstance(low, int):
                b_visible = b_visible & (o_column >= spread(low))
        if "query_segments" in token_info:
            own = token_info["query_segments"]
            b_visible = b_visible & (own == token_info["key_segments"]) & (own >= 0)
        return b_visible

    def _visible_at(self, o_query: Any, o_key: Any, token_info: dict[str, Any]) -> Any:
        """Visibility mask by positions; all arguments have one shape."""
        b_visible = (o_query < self.queries) & (o_key < self.keys)
        query = token_info["query_positions"] if "query_positions" in token_info else o_query + self.offset
        key = token_info.get("key_positions", o_key)
        if self.causal:
            b_past = key <= query
            b_visible = b_visible & ((b_past | (key < self.prefix)) if self.prefix else b_past)
        if self.left is not None:
            b_visible = b_visible & (key >= query - self.left)
        if self.right is not None:
            b_visible = b_visible & (key <= query + self.right)
        if self.chunk:
            b_visible = b_visible & (self._chunk(query) == self._chunk(key))
        return b_visible

    def _chunk(self, position: Any) -> Any:
        """The chunk of positions that may be negative."""
        chunk = jnp.full_like(position, self.chunk)
        quotient = lax.div(position, chunk)
        return jnp.where(position < quotient * chunk, quotient - 1, quotient)


def _in_tiles(low: Any, full_low: Any, full_high: Any, high: Any, length: int, block: int) -> tuple[Any, Any, Any, Any]:
    """Convert a range of elements to tiles within [0, tiles], low <= full_low <= full_high <= high."""
    size = jnp.int32(block)

    def down(end: Any) -> Any:
        return lax.div(jnp.maximum(jnp.int32(0), end), size)

    def up(end: Any) -> Any:
        return lax.div(jnp.maximum(jnp.int32(0), end) + (block - 1), size)

    low = down(low)
    high = jnp.maximum(low, up(jnp.minimum(high, jnp.int32(length))))
    full_low = jnp.minimum(jnp.maximum(up(full_low), low), high)
    full_high = jnp.minimum(jnp.maximum(down(full_high), full_low), high)
    return low, full_low, full_high, high


def mask_params_of(call: FlashAttentionCall) -> MaskParams:
    """The parameters of a call that `supports` accepts."""
    token_info = tuple(name for name in TOKEN_INFO if getattr(call, name) is not None)
    queries, keys = call.query.shape[1], call.key.shape[1]
    left, right = call.window or (None, None)
    farthest = queries + keys + abs(call.query_offset)
    positions = "query_positions" in token_info or "key_positions" in token_info
    if not positions:  # clip to the largest distance, so that sums do not overflow
        left, right = (None if side is None else min(side, farthest) for side in (left, right))
    chunk = call.chunk_size or 0
    return MaskParams(
        queries=queries,
        keys=keys,
        heads=call.query.shape[2],
        group=call.query.shape[2] // call.key.shape[2],
        causal=call.causal,
        prefix=call.prefix or 0,
        left=left,
        right=right,
        chunk=chunk if positions else min(chunk, farthest),
        offset=call.query_offset,
        token_info=token_info,
        scale=call.softmax_scale,
        cap=call.logits_soft_cap,
        approx_tanh=call.query.dtype == "bfloat16",
        bias=call.bias is not None,
        bounded=call.query.dtype == "bfloat16"
        and call.softmax_aux is None
        and (call.logits_soft_cap or math.inf) * LOG2_E <= BOUND,
    )


def token_info_of(params: MaskParams, inputs: FlashAttentionInputs, block_q: int, block_k: int) -> list[Any]:
    """The arrays named by `params.token_info`, padded to whole tiles; padded tokens are masked by index."""
    blocks = {"q": block_q, "k": block_k}
    arrays = [(getattr(inputs, name), blocks[name[0]]) for name in params.token_info]
    return [jnp.pad(array, ((0, 0), (0, -array.shape[1] % block))) for array, block in arrays]
