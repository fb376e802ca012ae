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

FUNCTIONS: Mapping[str, str] = {
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "attention": "attention",
    "flash_attention": "flash_attention",
    "flash_attn_varlen": "flash_attn_varlen",
    "scaled_dot_product_attention": "scaled_dot_product_attention",
}
"""Public function by every name that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Attention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "LayerNorm",
    "RmsNorm",
    "ScaledDotProductAttention",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "layer_norm",
    "rms_norm",
    "scaled_dot_product_attention",
]
