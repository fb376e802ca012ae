"""One scatter of the new tokens' rows, which XLA does in place where the buffer of the pages was donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._arrays import has_gradient, named
from ejkernel.operations._pages import INTERLEAVED
from ejkernel.operations.paged_cache_update.interface import (
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)
from ejkernel.plugin import current_target
from ejkernel_xla._numerics import accumulator


def _slots(call: PagedCacheUpdateCall, member: PagedCacheUpdateInputs) -> tuple[Any, Any]:
    """Page and offset `[n]` of every token; the page of those that are dropped is beyond the last one."""
    tokens, (requests, entries) = call.key.shape[1], call.block_tables.shape[1:]
    nowhere, size = call.pages.pages, call.pages.page_size
    if requests * entries * size == 0:
        return jnp.full(tokens, nowhere, jnp.int32), jnp.zeros(tokens, jnp.int32)
    row = jnp.arange(tokens, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(member.query_start_loc[1:], row, side="right"), requests - 1)
    end = member.query_start_loc[1:][own]
    position = member.kv_lens[own] - end + row
    owned = (row >= member.query_start_loc[own]) & (row < end) & (position >= 0) & (position < entries * size)
    position = jnp.where(owned, position, 0)
    page = member.block_tables[own, position // size]
    return jnp.where(owned & (page >= 0), jnp.minimum(page, nowhere), nowhere), position % size


def _rows(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any], which: int, new: Any) -> Any:
    """The reference `pages.at[...]` of the new tokens' rows; which is 0 for keys and 1 for values where pages hold both."""
    page, offset = slots
    if call.layout == "hptd":
        return pages.at[:, page, offset]
    if call.layout == "phtd":
        return pages.at[page, :, offset]
    if call.layout == INTERLEAVED:
        return pages.at[page, offset, : new.shape[1], which, : new.shape[2]]
    return pages.at[page, offset]


def _put(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any], which: int, new: Any) -> Any:
    value = jnp.swapaxes(new, 0, 1) if call.layout == "hptd" else new
    if pages.dtype.itemsize == 1 and jnp.issubdtype(pages.dtype, jnp.floating) and current_target().backend == "cpu":
        bits = _put(call, _bits(pages), slots, which, _bits(new))
        return jax.lax.bitcast_convert_type(bits, pages.dtype)
    return _rows(call, pages, slots, which, new).set(value, mode="drop")


def _bits(array: Any) -> Any:
    """XLA on a CPU scatters float8 by converting all of it to float16 and back; it copies the bits instead."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8)


def _take(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any], which: int, new: Any) -> Any:
    found = _rows(call, pages, slots, which, new).get(mode="fill", fill_value=0)
    return jnp.swapaxes(found, 0, 1) if call.layout == "hptd" else found


def _stored(new: Any, scale: Any, dtype: Any) -> Any:
    """As the pages hold it: scaled, rounded to nearest, and held within the range of one-byte types."""
    if new.dtype == dtype and scale is None:
        return new
    if scale is not None:
        wide = accumulator(new.dtype)
        new = new.astype(wide) / scale.astype(wide)[:, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(jnp.where(jnp.isnan(new), 0, new)), -128, 127).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        new = jnp.clip(new.astype(accumulator(new.dtype)), -limit, limit)
    return new.astype(dtype)


def _over_batch(function: Callable[..., Any], inputs: PagedCacheUpdateInputs, *more: Any) -> Any:
    """`function(member, *more)` for every member of the batch."""
    batch, arrays = inputs.key.shape[0], (inputs, *more)
    if batch == 1:
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], arrays)))
    shared = jax.tree.map(lambda leaf: leaf.shape[0] != batch, arrays)
    arrays = jax.tree.map(lambda leaf, alone: leaf[0] if alone else leaf, arrays, shared)
    return jax.vmap(function, in_axes=jax.tree.map(lambda alone: None if alone else 0, shared))(*arrays)


def forward(call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs, config: None) -> PagedCacheUpdateOutputs:
    def one(member: PagedCacheUpdateInputs) -> PagedCacheUpdateOutputs:
        slots, dtype = _slots(call, member), member.key_pages.dtype
        key, value = _stored(member.key, member.key_scale, dtype), _stored(member.value, member.value_scale, dtype)
        key_pages = _put(call, member.key_pages, slots, 0, key)
        if call.layout == INTERLEAVED:
            return PagedCacheUpdateOutputs(_put(call, key_pages, slots, 1, value))
        return PagedCacheUpdateOutputs(key_pages, _put(call, member.value_pages, slots, 1, value))

    return _over_batch(one, inputs)


def backward(
    call: PagedCacheUpdateCall,
    inputs: PagedCacheUpdateInputs,
    outputs: PagedCacheUpdateOutputs,
    cotangents: PagedCacheUpdateOutputs,
    config: None,
) -> PagedCacheUpdateInputs:
    """One-byte pages carry no gradient, so keys and values written into them get none either."""
    moving = [name for name, array in named(inputs) if name in _MOVING and has_gradient(array)]
    if cotangents.key_pages is None:
        found = {name: jnp.zeros_like(getattr(inputs, name)) for name in moving}
    else:
        gradients = _over_batch(lambda *arrays: _gradients(call, *arrays), inputs, *cotangents)
        found = {name: _as_input(gradients[name], getattr(inputs, name)) for name in moving}
    return PagedCacheUpdateInputs(**{**dict.fromkeys(PagedCacheUpdateInputs._fields), **found})


_MOVING = ("key", "value", "key_pages", "value_pages", "key_scale", "value_scale")


def _as_input(gradient: Any, array: Any) -> Any:
    """Summed over the batch where it shares the input, and in the input's dtype."""
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(array.dtype)


def _gradients(call: PagedCacheUpdateCall, member: PagedCacheUpdateInputs, d_keys: Any, d_values: Any) -> dict[str, Any]:
    slots, fused = _slots(call, member), call.layout == INTERLEAVED
    found: dict[str, Any] = {}
    for which, name, new, scale in ((0, "key", member.key, member.key_scale), (1, "value", member.value, member.value_scale)):
        wide = accumulator(new.dtype)
        taken = _take(call, d_keys if fused or which == 0 else d_values, slots, which, new).astype(wide)
        factor = 1 if scale is None else scale.astype(wide)[:, None]
        found[name] = taken / factor
        if scale is not None:
            part = -jnp.sum(taken * new.astype(wide) / (factor * factor), axis=(0, 2))
            found[f"{name}_scale"] = jnp.sum(part, keepdims=True) if scale.shape == (1,) else part
    d_keys = _put(call, d_keys, slots, 0, jnp.zeros_like(member.key, d_keys.dtype))
    if fused:
        return {**found, "key_pages": _put(call, d_keys, slots, 1, jnp.zeros_like(member.value, d_keys.dtype))}
    d_values = _put(call, d_values, slots, 1, jnp.zeros_like(member.value, d_values.dtype))
    return {**found, "key_pages": d_keys, "value_pages": d_values}
