"""The public functions and their class APIs: thin facades over the operations."""

from __future__ import annotations

from ejkernel._pipeline import typecheck
from ejkernel._plugins import catalog
from ejkernel.modules._class_api import Executor, create_default_executor
from ejkernel.modules.attention import (
    Attention,
    FlashAttention,
    FlashAttnVarlen,
    attention,
    flash_attention,
    flash_attn_varlen,
)
from ejkernel.modules.block_sparse import BlockSparseAttention, BlockSparseLayout, block_sparse_layout, blocksparse_attention
from ejkernel.modules.collectives import AllGatherMatmul, ReduceScatterMatmul, all_gather_matmul, reduce_scatter_matmul
from ejkernel.modules.constant_decays import LightningAttention, Retention, lightning_attention, lightning_attn, retention
from ejkernel.modules.convolutions import CausalConv1d, causal_conv1d
from ejkernel.modules.delta_products import GatedDeltaProduct, gated_delta_product
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
from ejkernel.modules.dot_product import ScaledDotProductAttention, scaled_dot_product_attention
from ejkernel.modules.latent import FlashMLA, MultiHeadLatentAttention, flash_mla, multi_head_latent_attention
from ejkernel.modules.latent_serving import (
    MultiLatentRaggedPageAttention,
    MultiLatentRaggedPageAttentionV2,
    multi_latent_ragged_page_attention,
    multi_latent_ragged_page_attention_v2,
)
from ejkernel.modules.losses import (
    CrossEntropyOutput,
    FusedCrossEntropy,
    FusedKLDivergence,
    KLDivergenceOutput,
    fused_cross_entropy,
    fused_kl_divergence,
)
from ejkernel.modules.mamba import Mamba3, mamba3
from ejkernel.modules.matmuls import GroupedMatmul, QuantizedMatmul, grouped_matmul, quantized_matmul
from ejkernel.modules.norms import (
    FusedAddRmsNorm,
    GatedRmsNorm,
    LayerNorm,
    RmsNorm,
    fused_add_rms_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
)
from ejkernel.modules.operations.configs import (
    AttentionConfig,
    BaseOperationConfig,
    BlockSparseAttentionConfig,
    FlashAttentionConfig,
    GatedDeltaRuleConfig,
    GroupedMatmulConfig,
    MultiLatentRaggedPageAttentionConfig,
    MultiLatentRaggedPageAttentionV2Config,
    RaggedPageAttentionv2Config,
    RaggedPageAttentionv2TurboQuantConfig,
    RaggedPageAttentionv3Config,
    RaggedPageAttentionv3TurboQuantConfig,
    RingAttentionConfig,
    ScaledDotProductAttentionConfig,
    UnifiedAttentionConfig,
)
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.recurrences import (
    RWKV6,
    GatedLinearAttention,
    GLAttention,
    RecurrentAttention,
    gla,
    gla_attention,
    recurrent,
    recurrent_attention,
    rwkv6,
)
from ejkernel.modules.ring import RingAttention, ring_attention, zigzag_shard, zigzag_unshard
from ejkernel.modules.rotary import (
    FusedQkNormRope,
    LlamaRope,
    LlamaRotaryEmbedding,
    Rope,
    fused_qk_norm_rope,
    llama_rope,
    rope,
)
from ejkernel.modules.serving import RaggedPageAttentionv2, UnifiedAttention, ragged_page_attention_v2, unified_attention
from ejkernel.modules.serving_decode import DecodeAttention, RaggedDecodeAttention, decode_attention, ragged_decode_attention
from ejkernel.modules.serving_pages import PageAttention, PrefillPageAttention, page_attention, prefill_page_attention
from ejkernel.modules.serving_updates import (
    ChunkedPrefillPagedDecode,
    PagedCacheUpdate,
    RaggedPageAttentionv3,
    chunked_prefill_paged_decode,
    paged_cache_update,
    ragged_page_attention_v3,
)
from ejkernel.modules.sparse_attention import (
    ApplyNativeSparseAttention,
    NativeSparseAttention,
    apply_native_sparse_attention,
    native_spare_attention,
    native_sparse_attention,
)
from ejkernel.modules.sparse_latent import DeepSeekAttention, deepseek_attn
from ejkernel.modules.states import RWKV4, StateSpaceV1, StateSpaceV2, rwkv4, state_space_v1, state_space_v2
from ejkernel.modules.xlstm import MLSTM, mlstm

__all__ = [
    "FUNCTIONS",
    "MLSTM",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "AllGatherMatmul",
    "ApplyNativeSparseAttention",
    "Attention",
    "AttentionConfig",
    "BaseOperationConfig",
    "BlockSparseAttention",
    "BlockSparseAttentionConfig",
    "BlockSparseLayout",
    "CausalConv1d",
    "ChunkedPrefillPagedDecode",
    "CrossEntropyOutput",
    "DecodeAttention",
    "DeepSeekAttention",
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
    "MeanPooling",
    "MultiHeadLatentAttention",
    "MultiLatentRaggedPageAttention",
    "MultiLatentRaggedPageAttentionConfig",
    "MultiLatentRaggedPageAttentionV2",
    "MultiLatentRaggedPageAttentionV2Config",
    "NativeSparseAttention",
    "PageAttention",
    "PagedCacheUpdate",
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
    "ScaledDotProductAttention",
    "ScaledDotProductAttentionConfig",
    "Softmax",
    "StateSpaceV1",
    "StateSpaceV2",
    "UnifiedAttention",
    "UnifiedAttentionConfig",
    "all_gather_matmul",
    "apply_native_sparse_attention",
    "attention",
    "block_sparse_layout",
    "blocksparse_attention",
    "causal_conv1d",
    "chunked_prefill_paged_decode",
    "create_default_executor",
    "decode_attention",
    "deepseek_attn",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "fused_add_rms_norm",
    "fused_cross_entropy",
    "fused_kl_divergence",
    "fused_qk_norm_rope",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_rms_norm",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "kernel_delta_attention",
    "layer_norm",
    "lightning_attention",
    "lightning_attn",
    "llama_rope",
    "mamba3",
    "mean_pooling",
    "mlstm",
    "multi_head_latent_attention",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "native_spare_attention",
    "native_sparse_attention",
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
    "scaled_dot_product_attention",
    "softmax",
    "state_space_v1",
    "state_space_v2",
    "unified_attention",
    "zigzag_shard",
    "zigzag_unshard",
]

FUNCTIONS = catalog.FUNCTIONS
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

if typecheck.on():
    globals().update(
        {name: typecheck.checked(globals()[name]) for name in __all__ if name in FUNCTIONS or name in catalog.HELPERS}
    )
