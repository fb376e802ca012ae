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
from ejkernel.modules.norms import RmsNorm, rms_norm

FUNCTIONS: Mapping[str, str] = {
    "attention": "attention",
    "flash_attention": "flash_attention",
    "flash_attn_varlen": "flash_attn_varlen",
    "rms_norm": "rms_norm",
    "scaled_dot_product_attention": "scaled_dot_product_attention",
}
"""Public function by every name that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Attention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "RmsNorm",
    "ScaledDotProductAttention",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "rms_norm",
    "scaled_dot_product_attention",
]
