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
from ejkernel.modules.collectives import AllGatherMatmul, ReduceScatterMatmul, all_gather_matmul, reduce_scatter_matmul
from ejkernel.modules.losses import (
    CrossEntropyOutput,
    FusedCrossEntropy,
    FusedKLDivergence,
    KLDivergenceOutput,
    fused_cross_entropy,
    fused_kl_divergence,
)
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.ring import RingAttention, ring_attention, zigzag_shard, zigzag_unshard
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope

FUNCTIONS = (
    "attention",
    "flash_attention",
    "flash_attn_varlen",
    "fused_cross_entropy",
    "fused_kl_divergence",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "ring_attention",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "AllGatherMatmul",
    "Attention",
    "CrossEntropyOutput",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "FusedCrossEntropy",
    "FusedKLDivergence",
    "GroupedMatmul",
    "KLDivergenceOutput",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "ReduceScatterMatmul",
    "RingAttention",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "all_gather_matmul",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "fused_cross_entropy",
    "fused_kl_divergence",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "reduce_scatter_matmul",
    "ring_attention",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
    "zigzag_shard",
    "zigzag_unshard",
]
