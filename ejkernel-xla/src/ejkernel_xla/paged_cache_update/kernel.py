"""One scatter of the new tokens' rows, which XLA does in place where the buffer of the pages was donated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import has_gradient, named
from ejkernel.operations.common.pages import FUSED, alternating
from ejkernel.operations.paged_cache_update.interface import (
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)
from ejkernel.plugin import current_target
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._batch import over_batch


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


def _rows(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any]) -> Any:
    """The reference `pages.at[...]` of the new tokens' rows."""
    page, offset = slots
    if call.layout == "hptd":
        return pages.at[:, page, offset]
    if call.layout == "phtd":
        return pages.at[page, :, offset]
    return pages.at[page, offset]


def _put(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any], new: Any) -> Any:
    if pages.dtype.itemsize == 1 and jnp.issubdtype(pages.dtype, jnp.floating) and current_target().backend == "cpu":
        bits = _put(call, _bits(pages), slots, _bits(new))
        return jax.lax.bitcast_convert_type(bits, pages.dtype)
    value = jnp.swapaxes(new, 0, 1) if call.layout == "hptd" else new
    return _rows(call, pages, slots).set(value, mode="drop")


def _bits(array: Any) -> Any:
    """XLA on a CPU scatters float8 by converting all of it to float16 and back; it copies the bits instead."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8)


def _take(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any]) -> Any:
    axis = 1 if call.layout == "hptd" else 0
    if pages.shape[axis] == 0:  # JAX cannot gather from it, even where all that is read is outside
        pages = jnp.zeros((*pages.shape[:axis], 1, *pages.shape[axis + 1 :]), pages.dtype)
        slots = jnp.ones_like(slots[0]), slots[1]
    found = _rows(call, pages, slots).get(mode="fill", fill_value=0)
    return jnp.swapaxes(found, 0, 1) if call.layout == "hptd" else found


def _put_both(call: PagedCacheUpdateCall, pages: Any, slots: tuple[Any, Any], key: Any, value: Any) -> Any:
    """Rows of pages that hold keys and values; what the new ones do not cover is kept."""
    tokens, heads, size = key.shape
    both = jnp.stack([key, value], axis=2).reshape(tokens, 2 * heads, size)
    rows = jnp.zeros((tokens, *pages.shape[2:]), pages.dtype)
    if both.size != rows.size:
        rows = _take(call, pages, slots)
    # not `.at[:, : 2 * heads, :size]`, whose list of indices is empty where all is written: XLA's compiler dies of it on a mesh
    whole = jax.lax.dynamic_update_slice(alternating(rows, call.layout), both, (0, 0, 0))
    return _put(call, pages, slots, whole.reshape(rows.shape))


def _stored(new: Any, scale: Any, dtype: Any) -> Any:
    """As the pages hold it: scaled, rounded to nearest, and held within the range of one-byte types."""
    if new.dtype == dtype and scale is None:
        return new
    if scale is not None:
        wide = accumulator(new.dtype)
        new = new.astype(wide) / scale.astype(wide)[None, :, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(jnp.where(jnp.isnan(new), 0, new)), -128, 127).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        new = jnp.clip(new.astype(accumulator(new.dtype)), -limit, limit)
    return new.astype(dtype)


def forward(call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs, config: None) -> PagedCacheUpdateOutputs:
    def one(member: PagedCacheUpdateInputs) -> PagedCacheUpdateOutputs:
        slots, dtype = _slots(call, member), member.key_pages.dtype
        key, value = _stored(member.key, member.key_scale, dtype), _stored(member.value, member.value_scale, dtype)
        if call.layout in FUSED:
            return PagedCacheUpdateOutputs(_put_both(call, member.key_pages, slots, key, value))
        pages = _put(call, member.key_pages, slots, key), _put(call, member.value_pages, slots, value)
        return PagedCacheUpdateOutputs(*pages)

    return over_batch(one, inputs.key.shape[0], inputs)


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
        gradients = over_batch(lambda *arrays: _gradients(call, *arrays), inputs.key.shape[0], inputs, *cotangents)
        found = {name: _as_input(gradients[name], getattr(inputs, name)) for name in moving}
    return PagedCacheUpdateInputs(**{**dict.fromkeys(PagedCacheUpdateInputs._fields), **found})


_MOVING = ("key", "value", "key_pages", "value_pages", "key_scale", "value_scale")


def _as_input(gradient: Any, array: Any) -> Any:
    """Summed over the batch where it shares the input, and in the input's dtype."""
    if array.shape[0] != gradient.shape[0]:
        gradient = jnp.sum(gradient, axis=0, keepdims=True)
    return gradient.astype(array.dtype)


def _gradients(call: PagedCacheUpdateCall, member: PagedCacheUpdateInputs, d_keys: Any, d_values: Any) -> dict[str, Any]:
    slots, fused = _slots(call, member), call.layout in FUSED
    heads, size = member.key.shape[1:]
    if fused:
        rows = alternating(_take(call, d_keys, slots), call.layout)
        taken = {"key": rows[:, 0 : 2 * heads : 2, :size], "value": rows[:, 1 : 2 * heads : 2, :size]}
    else:
        taken = {"key": _take(call, d_keys, slots), "value": _take(call, d_values, slots)}
    found: dict[str, Any] = {}
    for name, new, scale in (("key", member.key, member.key_scale), ("value", member.value, member.value_scale)):
        wide = accumulator(new.dtype)
        gradient = taken[name].astype(wide)
        factor = 1 if scale is None else scale.astype(wide)[None, :, None]
        found[name] = gradient / factor
        if scale is not None:
            part = -jnp.sum(gradient * new.astype(wide) / (factor * factor), axis=(0, 2))
            found[f"{name}_scale"] = jnp.sum(part, keepdims=True) if scale.shape == (1,) else part
    zeros = [jnp.zeros_like(part) for part in taken.values()]
    if fused:
        return {**found, "key_pages": _put_both(call, d_keys, slots, *zeros)}
    return {**found, "key_pages": _put(call, d_keys, slots, zeros[0]), "value_pages": _put(call, d_values, slots, zeros[1])}
