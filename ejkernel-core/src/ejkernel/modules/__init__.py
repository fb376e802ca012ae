"""The public functions and their class forms: thin facades over the operations."""

from __future__ import annotations

import importlib
from typing import Any

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
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope

FUNCTIONS = (
    "attention",
    "flash_attention",
    "flash_attn_varlen",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Attention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "GroupedMatmul",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
]


def __getattr__(name: str) -> Any:
    if name.endswith("Config"):
        configs = importlib.import_module("ejkernel.modules.operations.configs")
        if name in configs.__all__:
            return getattr(configs, name)
    raise AttributeError(f"module 'ejkernel.modules' has no attribute {name!r}")
