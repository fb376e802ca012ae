"""Both phases, over lists of tiles: the trip count of the loop is the number of listed tiles.

If the lists differ between batch members, the members are processed serially, each over its own tiles; if heads have lists, they
become members. The plain variant visits
all tiles that the static mask leaves and masks the rest inside them: JAX can differentiate it and XLA can partition it, but it
skips nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.block_sparse_attention.interface import (
    BlockSparseAttentionCall,
    BlockSparseAttentionInputs,
    as_flash_attention,
)
from ejkernel.operations.block_sparse_attention.tiles import TileLists, mapped, tile_lists
from ejkernel.operations.flash_attention.interface import FlashAttentionInputs, FlashAttentionOutputs
from ejkernel_xla.block_sparse_attention.config import BlockSparseAttentionConfig
from ejkernel_xla.block_sparse_attention.heads import (
    gradients_of_heads,
    heads_as_members,
    outputs_as_members,
    outputs_of_heads,
)
from ejkernel_xla.flash_attention import masks
from ejkernel_xla.flash_attention.backward import Gradients, backward_sweep, gradients_of
from ejkernel_xla.flash_attention.forward import attend, outputs_of
from ejkernel_xla.flash_attention.masks import Plan, both
from ejkernel_xla.flash_attention.tiles import operands


class _Schedule(NamedTuple):
    """Tiles in order: int32 `[b, n * m, 6]`, the fields of `Tile`; the first `count` `[b]` are valid."""

    tiles: Any
    count: Any


def forward(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, config: BlockSparseAttentionConfig
) -> FlashAttentionOutputs:
    if call.per_head_tiles:
        return outputs_of_heads(forward(*heads_as_members(call, inputs), config), call.query.shape[2])
    dense_call, dense_inputs = as_flash_attention(call, inputs)
    plan, schedule = _planned(call, inputs, config)

    def run(inputs: FlashAttentionInputs, plan: Plan) -> FlashAttentionOutputs:
        return outputs_of(dense_call, attend(dense_call, operands(dense_call, inputs), plan))

    return _each(run, plan, schedule, dense_inputs)


def backward(
    call: BlockSparseAttentionCall,
    inputs: BlockSparseAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BlockSparseAttentionConfig,
) -> BlockSparseAttentionInputs:
    if call.per_head_tiles:
        several = outputs_as_members(outputs), outputs_as_members(cotangents)
        found = backward(*heads_as_members(call, inputs), *several, config)
        return gradients_of_heads(call, inputs, found)
    dense_call, dense_inputs = as_flash_attention(call, inputs)
    plan, schedule = _planned(call, inputs, config)

    def run(arguments: Any, plan: Plan) -> Gradients:
        inputs, outputs, cotangents = arguments
        return backward_sweep(dense_call, operands(dense_call, inputs), outputs, cotangents, plan)

    sums = _each(run, plan, schedule, (dense_inputs, outputs, cotangents))
    return _gradients(dense_inputs, sums)


def plain_forward(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, config: BlockSparseAttentionConfig
) -> FlashAttentionOutputs:
    dense_call, dense_inputs, plan = _plain(call, inputs, config)
    return outputs_of(dense_call, attend(dense_call, operands(dense_call, dense_inputs), plan))


def plain_backward(
    call: BlockSparseAttentionCall,
    inputs: BlockSparseAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BlockSparseAttentionConfig,
) -> BlockSparseAttentionInputs:
    dense_call, dense_inputs, plan = _plain(call, inputs, config)
    sums = backward_sweep(dense_call, operands(dense_call, dense_inputs), outputs, cotangents, plan)
    return _gradients(dense_inputs, sums)


def _gradients(inputs: FlashAttentionInputs, sums: Gradients) -> BlockSparseAttentionInputs:
    shared = {
        name: jnp.sum(sum_, axis=0, keepdims=True) if sum_ is not None and sum_.shape[0] != array.shape[0] else sum_
        for name, sum_, array in (("bias", sums.bias, inputs.bias), ("sinks", sums.sinks, inputs.softmax_aux))
    }
    found = gradients_of(inputs, sums._replace(**shared))
    return BlockSparseAttentionInputs(found.query, found.key, found.value, bias=found.bias, softmax_aux=found.softmax_aux)


def _plain(call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, config: BlockSparseAttentionConfig) -> Any:
    dense_call, dense_inputs = as_flash_attention(call, inputs)
    plan = masks.plan(dense_call, config.q_blocksize, config.kv_blocksize)
    plan = dataclasses.replace(plan, predicate=call.mask_builder, masked=plan.masked or call.mask_builder is not None)
    if inputs.key_tiles is not None and len(plan.tiles):
        rows, columns = call.blocks
        tiles = -(-call.key.shape[1] // columns)
        listed = mapped(TileLists(inputs.key_tiles, None), tiles)
        listed = listed if call.per_head_tiles else listed[:, None]
        listed = jnp.repeat(jnp.repeat(listed, rows, 2), columns, 3)
        listed = listed[:, :, : call.query.shape[1], : call.key.shape[1]]
        dense_inputs = dense_inputs._replace(mask=both(inputs.mask, listed))
        plan = dataclasses.replace(plan, masked=True)
    return dense_call, dense_inputs, plan


def _planned(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, config: BlockSparseAttentionConfig
) -> tuple[Plan, _Schedule | None]:
    """A static plan where there is one tile or none, else a schedule beside it: `custom_partitioning` takes no constant arrays."""
    dense_call, _ = as_flash_attention(call, inputs)
    q_block, k_block = call.q_blocksize or config.q_blocksize, call.kv_blocksize or config.kv_blocksize
    q_block, k_block = min(q_block, max(call.query.shape[1], 1)), min(k_block, max(call.key.shape[1], 1))
    plan = masks.plan(dense_call, q_block, k_block)
    masked = plan.masked or call.mask_builder is not None or call.key_tiles is not None
    plan = dataclasses.replace(plan, predicate=call.mask_builder, masked=masked)
    if not len(plan.tiles) or (plan.single_tile and call.key_tiles is None):
        return plan, None
    if inputs.key_tiles is None:
        lists = tile_lists(dense_call, inputs, call.mask_builder, q_block, k_block)
    else:
        lists = TileLists(inputs.key_tiles, inputs.full_tiles)
    plan = dataclasses.replace(plan, single_tile=False, structured=masks.is_structured(dense_call), masked=True)
    return plan, _schedule(lists, plan, call.query.shape[1], call.key.shape[1])


def _schedule(lists: TileLists, plan: Plan, queries: int, keys: int) -> _Schedule:
    """Concatenate the lists. Rows of `tiles` past the count are not used."""
    blocks, longest = lists.key_tiles.shape[1:]
    steps = jnp.arange(blocks * longest, dtype=jnp.int32)

    def of_example(tiles: Any, counts: Any, full: Any) -> _Schedule:
        ends = jnp.cumsum(counts)
        row = jnp.minimum(jnp.searchsorted(ends, steps, side="right").astype(jnp.int32), blocks - 1)
        column = jnp.clip(steps - (ends - counts)[row], 0, longest - 1)
        first_query, first_key = row * plan.block_q, tiles[row, column] * plan.block_k
        parts = [
            jnp.minimum(first_query, queries - plan.block_q),
            jnp.minimum(first_key, keys - plan.block_k),
            first_query,
            first_key,
            column == 0,
            jnp.zeros_like(row) if full is None else full[row, column],
        ]
        return _Schedule(jnp.stack([part.astype(jnp.int32) for part in parts], axis=-1), ends[-1])

    return jax.vmap(of_example)(lists.key_tiles, lists.counts, lists.full_tiles)


def _each(run: Any, plan: Plan, schedule: _Schedule | None, arrays: Any) -> Any:
    """`run(arrays, plan)` of the whole batch over one schedule, or of each example over its own."""
    if schedule is None:
        return run(arrays, plan)
    if schedule.tiles.shape[0] == 1:
        return run(arrays, dataclasses.replace(plan, tiles=schedule.tiles[0], count=schedule.count[0]))
    leaves, tree = jax.tree.flatten(arrays)
    batch = schedule.tiles.shape[0]
    shared = [leaf.shape[0] != batch for leaf in leaves]

    def one(example: Any) -> Any:
        schedule, own = example
        own = iter(own)
        every = [leaf if common else next(own)[None] for leaf, common in zip(leaves, shared, strict=True)]
        found = run(jax.tree.unflatten(tree, every), dataclasses.replace(plan, tiles=schedule.tiles, count=schedule.count))
        return jax.tree.map(lambda leaf: leaf[0], found)

    return jax.lax.map(one, (schedule, [leaf for leaf, common in zip(leaves, shared, strict=True) if not common]))
