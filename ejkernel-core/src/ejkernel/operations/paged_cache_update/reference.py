"""`paged_cache_update` in NumPy float64: one token after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.operations.paged_attention.reference import token_major
from ejkernel.operations.paged_cache_update.interface import (
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)


def _slots(call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs) -> Iterator[tuple[int, int, int, int]]:
    """Batch member, token, page and offset of every token that is stored."""
    size = call.pages.page_size
    for b in range(len(inputs.key)):
        starts, lengths, tables = (a[b % len(a)] for a in (inputs.query_start_loc, inputs.kv_lens, inputs.block_tables))
        for r, length in enumerate(lengths):
            for token in range(starts[r], starts[r + 1]):
                position = int(length - starts[r + 1] + token)
                if 0 <= position < tables.shape[1] * size and 0 <= tables[r, position // size] < call.pages.pages:
                    yield b, token, int(tables[r, position // size]), position % size


def _scale(array: Any, member: int, heads: int) -> np.ndarray:
    """`[K, 1]`"""
    return np.ones((heads, 1)) if array is None else np.broadcast_to(array[member % len(array)], heads)[:, None]


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """As pages of this dtype hold them, in float64."""
    if dtype == "int8":
        return np.clip(np.round(np.where(np.isnan(values), 0, values)), -128, 127)
    info = jnp.finfo(dtype)
    limited = np.clip(values, float(info.min), float(info.max)) if jnp.dtype(dtype).itemsize == 1 else values
    return np.asarray(jnp.asarray(limited, jnp.float32).astype(dtype), np.float64) if info.bits < 32 else limited


def _halves(call: PagedCacheUpdateCall, key_pages: Any, value_pages: Any, member: int) -> tuple[Any, Any]:
    keys, values = token_major(key_pages[member], call.layout)
    return keys, values if values is not None else token_major(value_pages[member], call.layout)[0]


def forward(call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs) -> PagedCacheUpdateOutputs:
    key_pages = inputs.key_pages.copy()
    value_pages = None if inputs.value_pages is None else inputs.value_pages.copy()
    for b, token, page, offset in _slots(call, inputs):
        keys, values = _halves(call, key_pages, value_pages, b)
        for pages, new, scale in ((keys, inputs.key, inputs.key_scale), (values, inputs.value, inputs.value_scale)):
            heads, size = new.shape[2:]
            pages[page, offset, :heads, :size] = stored(new[b, token] / _scale(scale, b, heads), call.key_pages.dtype)
    return PagedCacheUpdateOutputs(key_pages, value_pages)


def backward(
    call: PagedCacheUpdateCall,
    inputs: PagedCacheUpdateInputs,
    outputs: PagedCacheUpdateOutputs,
    cotangents: PagedCacheUpdateOutputs,
) -> PagedCacheUpdateInputs:
    grad = {name: np.zeros(array.shape) for name, array in inputs._asdict().items() if array is not None}
    if cotangents.key_pages is not None:
        grad["key_pages"] = cotangents.key_pages.copy()
        if inputs.value_pages is not None:
            grad["value_pages"] = cotangents.value_pages.copy()
        for b, token, page, offset in _slots(call, inputs):
            halves = _halves(call, grad["key_pages"], grad.get("value_pages"), b)
            for pages, name in zip(halves, ("key", "value"), strict=True):
                new, scale = getattr(inputs, name), getattr(inputs, f"{name}_scale")
                heads, size = new.shape[2:]
                factor, taken = _scale(scale, b, heads), pages[page, offset, :heads, :size]
                grad[name][b, token] = taken / factor
                if scale is not None:
                    part = -(taken * new[b, token] / factor**2).sum(1)
                    total = grad[f"{name}_scale"][b % len(scale)]
                    total += part if len(total) > 1 else part.sum()
                pages[page, offset, :heads, :size] = 0
    moving = ("key", "value", "key_scale", "value_scale")
    moving += ("key_pages", "value_pages") if cotangents.key_pages is not None else ()
    return PagedCacheUpdateInputs(
        **{name: grad.get(name) if name in moving else None for name in PagedCacheUpdateInputs._fields}
    )
