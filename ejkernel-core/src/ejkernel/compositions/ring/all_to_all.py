"""Attention over a split sequence by heads: each device exchanges its share of the tokens for all tokens of its share of the heads.

Between two exchanges `flash_attention` sees whole sequences in natural order, so every mask is what it is on one device. An
exchange is its own transpose: gradients are those that JAX makes of the whole.
Source: Jacobs et al., DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models,
2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.partition import vary_like
from ejkernel.compositions.axes import Axes
from ejkernel.errors import invalid
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.operations.flash_attention.visibility import Visibility

_BATCH, _TOKENS, _HEADS = range(3)
"""Axes of queries, keys, values, outputs and the log-sum-exp."""


def attend_by_heads(
    axes: Axes, size: int, arrays: Mapping[str, Any], options: Mapping[str, Any], *, platform: Any, cfg: Any
) -> Any:
    """`flash_attention` of the whole sequence, from this device's shards and for them.

    Args:
        axes: mesh axes over which the sequence is split.
        size: number of devices along them.
        arrays: as in `bound_shard`: bias and dense mask have the shard's queries as rows and all keys as columns.
        options: of `flash_attention`.
        platform, cfg: as in `Operation.invoke`.

    Raises:
        ValueError: the devices do not divide the query heads.
    """
    given: dict[str, Any] = jax.tree.map(lambda leaf: vary_like(leaf, jax.lax.axis_index(axes)), dict(arrays))
    query, key, value = (given[name] for name in ("query", "key", "value"))
    bind.check_query_key_value(query, key, value)
    batch, queries, heads, _ = query.shape
    if heads % size:
        remedy = "use strategy='ring', which splits no heads, or fewer devices"
        raise invalid("query", f"{heads} heads", f"a multiple of the {size} devices of axis_name={axes}", remedy=remedy)
    sizes = (batch, heads, queries, size * key.shape[_TOKENS])
    exchange = _Exchange(axes, size)
    # Consecutive copies keep every query head with its key head. A device then receives the heads that its queries read.
    copies = size // math.gcd(size, key.shape[_HEADS])
    key, value = (array if copies == 1 else jnp.repeat(array, copies, axis=_HEADS) for array in (key, value))
    given |= {"query": exchange.whole(query), "key": exchange.whole(key), "value": exchange.whole(value)}
    if "bias" in given:
        given["bias"] = exchange.scores(bind.as_bias(given["bias"], sizes), queries)
    if "softmax_aux" in given:
        sinks = bind.as_sinks(given["softmax_aux"], heads)
        given["softmax_aux"] = None if sinks is None else exchange.own(sinks[0], 0)
    if "mask_info" in given:
        given["mask_info"] = _whole_mask(exchange, given["mask_info"], sizes)
    found = OPERATION.invoke(given, options, platform=platform, cfg=cfg)
    return jax.tree.map(exchange.shard, found)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """What devices along `axes`, `size` of them, send each other."""

    axes: Axes
    size: int

    def whole(self, array: Any, heads: int = _HEADS, tokens: int = _TOKENS) -> Any:
        """All tokens of this device's heads, from all heads of its tokens."""
        return jax.lax.all_to_all(array, self.axes, heads, tokens, tiled=True)

    def shard(self, array: Any) -> Any:
        """The inverse of `whole`."""
        return self.whole(array, _TOKENS, _HEADS)

    def gathered(self, array: Any, axis: int) -> Any:
        return jax.lax.all_gather(array, self.axes, axis=axis, tiled=True)

    def own(self, array: Any, axis: int) -> Any:
        """This device's heads of an array that has all of them."""
        share = array.shape[axis] // self.size
        return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(self.axes) * share, share, axis)

    def scores(self, array: Any, queries: int) -> Any:
        """All rows of this device's heads of an array `[B|1, H|1, queries|1, S|1]`."""
        by_head = array.shape[1] != 1
        if array.shape[2] == queries:
            return self.whole(array, 1, 2) if by_head else self.gathered(array, 2)
        return self.own(array, 1) if by_head else array


def _whole_mask(exchange: _Exchange, info: Any, sizes: tuple[int, int, int, int]) -> Any:
    """The mask of the whole sequence; lengths are that already."""
    mask = Visibility.of_mask_info(info).mask
    of_tokens = ("query_segments", "key_segments", "query_positions", "key_positions")
    given = {name: getattr(info, name) for name in of_tokens}
    return info.replace(
        dense=None if mask is None else exchange.scores(bind.as_score_shaped("mask_info", mask, sizes), sizes[2]),
        **{name: None if array is None else exchange.gathered(array, _TOKENS) for name, array in given.items()},
        sizes=(None, None, None),
    )
