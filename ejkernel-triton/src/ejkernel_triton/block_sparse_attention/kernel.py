"""Both phases: the kernels of `flash_attention`, over lists of tiles that are made on the device once for each of them."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention.interface import BlockSparseAttentionCall, BlockSparseAttentionInputs
from ejkernel.operations.flash_attention.interface import FlashAttentionOutputs
from ejkernel_triton.block_sparse_attention.problem import dense_problem
from ejkernel_triton.flash_attention import kernel as flash_attention
from ejkernel_triton.flash_attention.config import BackwardConfig, ForwardConfig


def forward(call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs, config: ForwardConfig) -> FlashAttentionOutputs:
    dense_call, dense_inputs, lists = dense_problem(call, inputs)
    return flash_attention.forward(dense_call, dense_inputs, config, lists)


def backward(
    call: BlockSparseAttentionCall,
    inputs: BlockSparseAttentionInputs,
    outputs: FlashAttentionOutputs,
    cotangents: FlashAttentionOutputs,
    config: BackwardConfig,
) -> BlockSparseAttentionInputs:
    dense_call, dense_inputs, lists = dense_problem(call, inputs)
    found = flash_attention.backward(dense_call, dense_inputs, outputs, cotangents, config, lists)
    return BlockSparseAttentionInputs(found.query, found.key, found.value, bias=found.bias, softmax_aux=found.softmax_aux)
