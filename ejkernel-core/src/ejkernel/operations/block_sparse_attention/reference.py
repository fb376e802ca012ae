"""`block_sparse_attention` in NumPy float64: dense attention under the mask that the lists and the predicate amount to."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ejkernel.call.arrays import ArraySpec
from ejkernel.operations.block_sparse_attention.interface import (
    BlockSparseAttentionCall,
    BlockSparseAttentionInputs,
    as_flash_attention,
)
from ejkernel.operations.flash_attention import reference as dense
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs


def forward(call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs) -> FlashAttentionOutputs:
    return dense.forward(*_dense(call, inputs))


def backward(
    call: BlockSparseAttentionCall,
    inputs: BlockSparseAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
) -> BlockSparseAttentionInputs:
    dense_call, dense_inputs = _dense(call, inputs)
    found = dense.backward(dense_call, dense_inputs, outputs, cotangents)
    return BlockSparseAttentionInputs(found.query, found.key, found.value, bias=found.bias, softmax_aux=found.softmax_aux)


def _dense(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs
) -> tuple[FlashAttentionCall, FlashAttentionInputs]:
    """The call and inputs of dense attention, with one mask for everything that it lacks."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    seen = np.ones((1, 1, queries, keys), bool)
    if call.mask_builder is not None:
        query = inputs.query_positions
        query = np.arange(queries, dtype=np.int32)[None] + call.query_offset if query is None else query
        key = np.arange(keys, dtype=np.int32)[None] if inputs.key_positions is None else inputs.key_positions
        seen = seen & np.asarray(call.mask_builder(query[:, None, :, None], key[:, None, None, :]))
    if inputs.key_tiles is not None:
        seen = seen & _listed(call, inputs)
    if inputs.mask is not None:
        seen = seen & inputs.mask
    flash_call, flash_inputs = as_flash_attention(call, inputs)
    return dataclasses.replace(flash_call, mask=ArraySpec(seen.shape, "bool")), flash_inputs._replace(mask=seen)


def _listed(call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs) -> np.ndarray:
    lists = inputs.key_tiles if call.per_head_tiles else inputs.key_tiles[:, None]
    seen = np.zeros((*lists.shape[:2], call.query.shape[1], call.key.shape[1]), bool)
    rows, columns = call.blocks
    for b, h, i in np.ndindex(lists.shape[:3]):
        for j in itertools.takewhile(lambda tile: tile >= 0, lists[b, h, i]):
            seen[b, h, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = True
    return seen
