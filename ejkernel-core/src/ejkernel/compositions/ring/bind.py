"""The entry point of ring attention: the shards of one device, checked, as a ring and its inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.records import Bound
from ejkernel.compositions.axes import Axes
from ejkernel.compositions.ring.plan import ALL_TO_ALL, CONTIGUOUS, LAYOUTS, STRATEGIES, ZIGZAG, positions_of
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.operations.flash_attention.visibility import TracedLimits, Visibility


def bound_shard(
    axes: Axes,
    size: int,
    layout: str,
    *,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask_info: Any = None,
    **rest: Any,
) -> Bound:
    """The call of `flash_attention` on one shard's own queries and keys; its inputs hold bias and mask over all keys.

    A bias and a dense mask have the shard's queries as rows and the keys of the whole ring as columns; segments and positions
    are those of the shard's own tokens; lengths count tokens of the whole sequence.
    """
    bind.check_query_key_value(query, key, value)
    if query.dtype == jnp.float64:
        remedy = "the log-sum-exp that blocks exchange is float32"
        raise wrong_type("query", "dtype float64", "float16, bfloat16 or float32", remedy=remedy)
    batch, queries, heads, _ = query.shape
    keys = key.shape[1]
    if layout == ZIGZAG and (queries % 2 or keys % 2):
        raise invalid("query", f"{queries} queries and {keys} keys on a device", "even numbers with layout='zigzag'")
    sizes = (batch, heads, queries, size * keys)
    mask = Visibility.of_mask_info(mask_info).mask
    limits, *static = TracedLimits.taken_from(rest.get("sliding_window"), rest.get("chunk_size"))
    rest |= dict(zip(("sliding_window", "chunk_size"), static, strict=True))
    info = None if mask_info is None else _local(mask_info, axes, size, layout, queries, keys)
    bound = OPERATION.canonicalise(query, key, value, mask_info=info, **rest)
    mask = None if mask is None else bind.as_score_shaped("mask_info", mask, sizes)
    if limits.given:
        query_positions, key_positions = _all_positions(mask_info, axes, size, layout, queries, keys)
        limited = limits.mask(query_positions, key_positions)
        mask = limited if mask is None else limited & mask
    inputs = bound.inputs._replace(bias=None if bias is None else bind.as_bias(bias, sizes), mask=mask)
    return Bound(bound.call, inputs, bound.finish)


def _local(info: Any, axes: Any, size: int, layout: str, queries: int, keys: int) -> Any:
    """The mask without its dense part, and with lengths of the whole sequence turned into this shard's segments."""
    device = jax.lax.axis_index(axes)
    index = (positions_of(layout, device, size, length) for length in (queries, keys))
    padded = Visibility(
        query_segments=info.query_segments,
        key_segments=info.key_segments,
        query_lengths=info.query_lengths,
        key_lengths=info.key_lengths,
    ).with_padding_as_segments(*index)
    return info.replace(
        dense=None,
        query_segments=padded.query_segments,
        key_segments=padded.key_segments,
        query_lengths=None,
        key_lengths=None,
        sizes=(None, None, None),
    )


def _all_positions(info: Any, axes: Any, size: int, layout: str, queries: int, keys: int) -> tuple[Any, Any]:
    """Positions of this shard's queries `[B|1, T]` and of the keys of the whole ring `[B|1, size S]`, in the order of devices."""
    query = None if info is None else info.query_positions
    key = None if info is None else info.key_positions
    query = positions_of(layout, jax.lax.axis_index(axes), size, queries)[None] if query is None else query
    if key is None:
        key = jnp.concatenate([positions_of(layout, device, size, keys) for device in range(size)])[None]
    else:
        key = jax.lax.all_gather(key, axes, axis=1, tiled=True)
    return query + (0 if info is None else info.causal_offset), key


def check_words(layout: Any, strategy: Any) -> None:
    """Refuse an unknown order of the sequence or strategy, and the two that do not go together."""
    for name, value, words in (("layout", layout, LAYOUTS), ("strategy", strategy, STRATEGIES)):
        if value not in words:
            raise invalid(name, repr(value), f"one of {', '.join(words)}")
    if strategy == ALL_TO_ALL and layout != CONTIGUOUS:
        remedy = "keep the natural order: every device attends over the whole sequence, so the work is balanced in it"
        raise invalid("layout", repr(layout), "'contiguous' with strategy='all_to_all'", remedy=remedy)
