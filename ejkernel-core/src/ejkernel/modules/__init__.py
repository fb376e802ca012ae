"""The public functions and their class forms: thin facades over the operations."""

from __future__ import annotations

from ejkernel.modules._forms import Executor, create_default_executor
from ejkernel.modules.attention import (
    Attention,
    FlashAttention,
    FlashAttnVarlen,
    ScaledDotProductAttention,
    attention,
    flash_attention,
    flash_attn_varlen,
    scaled_dot_product_attention,
)
from ejkernel.modules.latent import FlashMLA, MultiHeadLatentAttention, flash_mla, multi_head_latent_attention
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope
from ejkernel.modules.sparse_attention import (
    BlockSparseAttention,
    BlockSparseLayout,
    block_sparse_layout,
    blocksparse_attention,
)

FUNCTIONS = (
    "attention",
    "blocksparse_attention",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "multi_head_latent_attention",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Attention",
    "BlockSparseAttention",
    "BlockSparseLayout",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "FlashMLA",
    "GroupedMatmul",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "MultiHeadLatentAttention",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "attention",
    "block_sparse_layout",
    "blocksparse_attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "multi_head_latent_attention",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
]
