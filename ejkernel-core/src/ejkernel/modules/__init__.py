"""The public functions and their class forms: thin facades over the operations."""

from __future__ import annotations

from collections.abc import Mapping

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
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope

FUNCTIONS: Mapping[str, str] = {
    "layer_norm": "layer_norm",
    "llama_rope": "llama_rope",
    "rms_norm": "rms_norm",
    "attention": "attention",
    "flash_attention": "flash_attention",
    "flash_attn_varlen": "flash_attn_varlen",
    "scaled_dot_product_attention": "scaled_dot_product_attention",
    "rope": "rope",
    "softmax": "softmax",
}
"""Public function by every name that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Attention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "layer_norm",
    "llama_rope",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
]
