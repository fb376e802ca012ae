"""The public functions and their class forms: thin facades over the operations."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.modules._forms import Executor, create_default_executor
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope

FUNCTIONS: Mapping[str, str] = {
    "grouped_matmul": "grouped_matmul",
    "layer_norm": "layer_norm",
    "llama_rope": "llama_rope",
    "mean_pooling": "mean_pooling",
    "rms_norm": "rms_norm",
    "rope": "rope",
    "softmax": "softmax",
}
"""Public function by every name that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Executor",
    "GroupedMatmul",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "RmsNorm",
    "Rope",
    "Softmax",
    "create_default_executor",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "rms_norm",
    "rope",
    "softmax",
]
