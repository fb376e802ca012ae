"""Lists of every head: heads become members of the batch, of one head each, and what they share is repeated."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.call import ArraySpec
from ejkernel.operations.block_sparse_attention.interface import BlockSparseAttentionCall, BlockSparseAttentionInputs
from ejkernel.operations.flash_attention.interface import FlashAttentionOutputs
from ejkernel.utils.dtypes import accumulator

_OF_HEADS = ("bias", "mask", "softmax_aux", "key_tiles", "full_tiles")
"""Arrays `[b?, h?, ...]`; others but query, key and value are `[b?, ...]`."""


def heads_as_members(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs
) -> tuple[BlockSparseAttentionCall, BlockSparseAttentionInputs]:
    """The same problem with `b * h` members."""
    batch, _, heads, _ = call.query.shape

    def folded(name: str, array: Any) -> Any:
        if name in ("query", "key", "value"):
            array = jnp.repeat(array, heads // array.shape[2], axis=2)
            return members(array)
        if name in _OF_HEADS:
            array = jnp.broadcast_to(array, (batch, heads, *array.shape[2:]))
            array = array.reshape(batch * heads, 1, *array.shape[2:])
            return array[:, 0] if name in ("key_tiles", "full_tiles") else array
        return array if array.shape[0] == 1 else jnp.repeat(array, heads, axis=0)

    made = {name: folded(name, array) for name, array in inputs._asdict().items() if array is not None}
    specs = {name: ArraySpec.of(array) for name, array in made.items()}
    changed: dict[str, Any] = {**specs, "per_head_tiles": False}
    return dataclasses.replace(call, **changed), BlockSparseAttentionInputs(**made)


def members(array: Any) -> Any:
    """`[b, t, h, ...]` as `[b * h, t, 1, ...]`."""
    array = jnp.swapaxes(array, 1, 2)
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2], 1, *array.shape[3:])


def outputs_as_members(outputs: FlashAttentionOutputs) -> FlashAttentionOutputs:
    return FlashAttentionOutputs(*(None if array is None else members(array) for array in outputs))


def outputs_of_heads(outputs: FlashAttentionOutputs, heads: int) -> FlashAttentionOutputs:
    """Back from members."""
    return FlashAttentionOutputs(*(None if array is None else _of_heads(array, heads) for array in outputs))


def _of_heads(array: Any, heads: int) -> Any:
    """`[b * h, t, 1, ...]` as `[b, t, h, ...]`."""
    return jnp.swapaxes(array.reshape(-1, heads, array.shape[1], *array.shape[3:]), 1, 2)


def gradients_of_heads(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, found: BlockSparseAttentionInputs
) -> BlockSparseAttentionInputs:
    """Back from members; gradients of what several of them share are summed in float32."""
    heads = call.query.shape[2]

    def summed(gradient: Any, axes: tuple[int, ...], *, keepdims: bool) -> Any:
        wide = gradient.astype(accumulator(gradient.dtype))
        return jnp.sum(wide, axis=axes, keepdims=keepdims).astype(gradient.dtype)

    def of_keys(gradient: Any, key_heads: int) -> Any:
        by_head = _of_heads(gradient, heads)
        grouped = by_head.reshape(*by_head.shape[:2], key_heads, heads // key_heads, by_head.shape[3])
        return summed(grouped, (3,), keepdims=False)

    def shared(gradient: Any, array: Any) -> Any:
        gradient = gradient.reshape(-1, heads, *gradient.shape[2:])
        axes = tuple(axis for axis in (0, 1) if array.shape[axis] != gradient.shape[axis])
        return summed(gradient, axes, keepdims=True) if axes else gradient

    return BlockSparseAttentionInputs(
        _of_heads(found.query, heads),
        of_keys(found.key, call.key.shape[2]),
        of_keys(found.value, call.key.shape[2]),
        bias=None if found.bias is None else shared(found.bias, inputs.bias),
        softmax_aux=None if found.softmax_aux is None else shared(found.softmax_aux, inputs.softmax_aux),
    )
