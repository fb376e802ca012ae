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
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.recurrences import (
    RWKV6,
    GatedLinearAttention,
    GLAttention,
    LightningAttention,
    RecurrentAttention,
    Retention,
    gla,
    gla_attention,
    lightning_attention,
    lightning_attn,
    recurrent,
    recurrent_attention,
    retention,
    rwkv6,
)
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope
from ejkernel.modules.states import (
    RWKV4,
    StateSpaceV1,
    StateSpaceV2,
    rwkv4,
    state_space_v1,
    state_space_v2,
)

FUNCTIONS = (
    "attention",
    "flash_attention",
    "flash_attn_varlen",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "layer_norm",
    "lightning_attention",
    "lightning_attn",
    "llama_rope",
    "mean_pooling",
    "recurrent",
    "recurrent_attention",
    "retention",
    "rms_norm",
    "rope",
    "rwkv4",
    "rwkv6",
    "scaled_dot_product_attention",
    "softmax",
    "state_space_v1",
    "state_space_v2",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "RWKV4",
    "RWKV6",
    "Attention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "GLAttention",
    "GatedLinearAttention",
    "GroupedMatmul",
    "LayerNorm",
    "LightningAttention",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "RecurrentAttention",
    "Retention",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "StateSpaceV1",
    "StateSpaceV2",
    "attention",
    "create_default_executor",
    "flash_attention",
    "flash_attn_varlen",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "layer_norm",
    "lightning_attention",
    "lightning_attn",
    "llama_rope",
    "mean_pooling",
    "recurrent",
    "recurrent_attention",
    "retention",
    "rms_norm",
    "rope",
    "rwkv4",
    "rwkv6",
    "scaled_dot_product_attention",
    "softmax",
    "state_space_v1",
    "state_space_v2",
]
