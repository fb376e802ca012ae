"""ejkernel: the fastest correct kernel on whatever machine you have, from one call."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` below finds at run time
    from ejkernel import (
        callib as callib,
    )
    from ejkernel import (
        loggings as loggings,
    )
    from ejkernel import (
        masks as masks,
    )
    from ejkernel import (
        modules as modules,
    )
    from ejkernel import (
        ops as ops,
    )
    from ejkernel import (
        packing as packing,
    )
    from ejkernel import (
        plugin as plugin,
    )
    from ejkernel import (
        quantization as quantization,
    )
    from ejkernel import (
        testing as testing,
    )
    from ejkernel import (
        tuning as tuning,
    )
    from ejkernel import (
        types as types,
    )
    from ejkernel import (
        typing as typing,
    )
    from ejkernel import (
        utils as utils,
    )
    from ejkernel import (
        xla_utils as xla_utils,
    )
    from ejkernel._dispatch.explanation import explain
    from ejkernel._plugins.export import EXPORT_DISABLED_CHECKS
    from ejkernel._plugins.registry import Backend, Platform, kernel_registry
    from ejkernel.call.policy import use
    from ejkernel.errors import (
        AnnotationError,
        EjkernelError,
        NoConfigError,
        NoKernelError,
        NoTunerError,
        PluginError,
        TracingError,
    )
    from ejkernel.masks import MaskInfo
    from ejkernel.modules import *
    from ejkernel.tuning import autotune, overlay

from ejkernel._version import __version__ as __version__

__all__ = [
    "EXPORT_DISABLED_CHECKS",
    "MLSTM",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "AllGatherMatmul",
    "AnnotationError",
    "ApplyNativeSparseAttention",
    "Attention",
    "AttentionConfig",
    "Backend",
    "BaseOperationConfig",
    "BlockSparseAttention",
    "BlockSparseAttentionConfig",
    "BlockSparseLayout",
    "CausalConv1d",
    "ChunkedPrefillPagedDecode",
    "CrossEntropyOutput",
    "DecodeAttention",
    "DeepSeekAttention",
    "EjkernelError",
    "Executor",
    "FlashAttention",
    "FlashAttentionConfig",
    "FlashAttnVarlen",
    "FlashMLA",
    "FusedAddRmsNorm",
    "FusedCrossEntropy",
    "FusedKLDivergence",
    "FusedQkNormRope",
    "GLAttention",
    "GatedDeltaProduct",
    "GatedDeltaRule",
    "GatedDeltaRuleConfig",
    "GatedLinearAttention",
    "GatedLinearUnit",
    "GatedRmsNorm",
    "GroupedMatmul",
    "GroupedMatmulConfig",
    "KLDivergenceOutput",
    "KernelDeltaAttention",
    "LayerNorm",
    "LightningAttention",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "Mamba3",
    "MaskInfo",
    "MeanPooling",
    "MoePermute",
    "MoePermuteOutput",
    "MoeRoute",
    "MoeRouteOutput",
    "MoeUnpermute",
    "MultiHeadLatentAttention",
    "MultiLatentRaggedPageAttention",
    "MultiLatentRaggedPageAttentionConfig",
    "MultiLatentRaggedPageAttentionV2",
    "MultiLatentRaggedPageAttentionV2Config",
    "NativeSparseAttention",
    "NoConfigError",
    "NoKernelError",
    "NoTunerError",
    "PageAttention",
    "PagedCacheUpdate",
    "Platform",
    "PluginError",
    "PrefillPageAttention",
    "QuantizedMatmul",
    "RWKV7Mul",
    "RaggedDecodeAttention",
    "RaggedGatedDeltaRule",
    "RaggedPageAttentionv2",
    "RaggedPageAttentionv2Config",
    "RaggedPageAttentionv2TurboQuantConfig",
    "RaggedPageAttentionv3",
    "RaggedPageAttentionv3Config",
    "RaggedPageAttentionv3TurboQuantConfig",
    "RecurrentAttention",
    "ReduceScatterMatmul",
    "Retention",
    "RingAttention",
    "RingAttentionConfig",
    "RmsNorm",
    "Rope",
    "SampleTokens",
    "ScaledDotProductAttention",
    "ScaledDotProductAttentionConfig",
    "ScaledMatmul",
    "Softmax",
    "StateSpaceV1",
    "StateSpaceV2",
    "TokenLogprobs",
    "TracingError",
    "UnifiedAttention",
    "UnifiedAttentionConfig",
    "__version__",
    "all_gather_matmul",
    "apply_native_sparse_attention",
    "attention",
    "autotune",
    "block_sparse_layout",
    "blocksparse_attention",
    "causal_conv1d",
    "chunked_prefill_paged_decode",
    "create_default_executor",
    "decode_attention",
    "deepseek_attn",
    "explain",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "fused_add_rms_norm",
    "fused_cross_entropy",
    "fused_kl_divergence",
    "fused_qk_norm_rope",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_linear_unit",
    "gated_rms_norm",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "kernel_delta_attention",
    "kernel_registry",
    "layer_norm",
    "lightning_attention",
    "lightning_attn",
    "llama_rope",
    "mamba3",
    "mean_pooling",
    "mlstm",
    "moe_load_balancing_loss",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "moe_z_loss",
    "multi_head_latent_attention",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "native_spare_attention",
    "native_sparse_attention",
    "overlay",
    "page_attention",
    "paged_cache_update",
    "prefill_page_attention",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "recurrent",
    "recurrent_attention",
    "reduce_scatter_matmul",
    "retention",
    "ring_attention",
    "rms_norm",
    "rope",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "rwkv7_mul",
    "sample_tokens",
    "scaled_dot_product_attention",
    "scaled_matmul",
    "sequence_parallel",
    "softmax",
    "state_space_v1",
    "state_space_v2",
    "token_logprobs",
    "unified_attention",
    "use",
    "zigzag_shard",
    "zigzag_unshard",
]

_SUBMODULES = (
    "callib",
    "kernels",
    "logging_utils",
    "loggings",
    "masks",
    "modules",
    "ops",
    "packing",
    "plugin",
    "quantization",
    "testing",
    "tuning",
    "types",
    "typing",
    "utils",
    "xla_utils",
)

_LAZY = {
    "EXPORT_DISABLED_CHECKS": "ejkernel._plugins.export",
    "MaskInfo": "ejkernel.masks",
    "explain": "ejkernel._dispatch.explanation",
    "use": "ejkernel.call.policy",
    **dict.fromkeys(("Backend", "Platform", "kernel_registry"), "ejkernel._plugins.registry"),
    **dict.fromkeys(("autotune", "overlay"), "ejkernel.tuning"),
    **dict.fromkeys(
        ("AnnotationError", "EjkernelError", "NoConfigError", "NoKernelError", "NoTunerError", "PluginError", "TracingError"),
        "ejkernel.errors",
    ),
}
"""Names and where they live; the public functions and their class APIs are those of `ejkernel.modules`."""


if not TYPE_CHECKING:  # checkers would take it to define every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"ejkernel.{name}")
        source = _LAZY.get(name)
        if source is None and not name.startswith("_") and name in importlib.import_module("ejkernel.modules").__all__:
            source = "ejkernel.modules"
        if source is None:
            raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")
        return globals().setdefault(name, getattr(importlib.import_module(source), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES, *importlib.import_module("ejkernel.modules").__all__})


def _discover() -> None:
    from ejkernel._plugins.discovery import discover
    from ejkernel._plugins.registry import kernel_registry

    kernel_registry.load(discover())


if not getattr(sys.modules.get("ejkernel_launcher"), "running", False):  # that program discovers plugins when a command runs
    _discover()
