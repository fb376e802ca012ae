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
from ejkernel.modules.deltas import (
    RWKV7,
    GatedDeltaRule,
    KernelDeltaAttention,
    RaggedGatedDeltaRule,
    RWKV7Mul,
    gated_delta_rule,
    kernel_delta_attention,
    ragged_gated_delta_rule,
    rwkv7,
    rwkv7_mul,
)
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope

FUNCTIONS = (
    "attention",
    "flash_attention",
    "flash_attn_varlen",
    "gated_delta_rule",
    "grouped_matmul",
    "kernel_delta_attention",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "ragged_gated_delta_rule",
    "rms_norm",
    "rope",
    "rwkv7",
    "rwkv7_mul",
    "scaled_dot_product_attention",
    "softmax",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "RWKV7",
    "Attention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "GatedDeltaRule",
    "GroupedMatmul",
    "KernelDeltaAttention",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "RWKV7Mul",
    "RaggedGatedDeltaRule",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "gated_delta_rule",
    "grouped_matmul",
    "kernel_delta_attention",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "ragged_gated_delta_rule",
    "rms_norm",
    "rope",
    "rwkv7",
    "rwkv7_mul",
    "scaled_dot_product_attention",
    "softmax",
]
