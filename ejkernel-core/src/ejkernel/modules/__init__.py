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
from ejkernel.modules.latent import FlashMLA, MultiHeadLatentAttention, flash_mla, multi_head_latent_attention
from ejkernel.modules.latent_serving import (
    MultiLatentRaggedPageAttention,
    MultiLatentRaggedPageAttentionV2,
    multi_latent_ragged_page_attention,
    multi_latent_ragged_page_attention_v2,
)
from ejkernel.modules.matmuls import GroupedMatmul, grouped_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.rotary import LlamaRope, LlamaRotaryEmbedding, Rope, llama_rope, rope
from ejkernel.modules.serving import (
    PageAttention,
    PrefillPageAttention,
    RaggedPageAttentionv2,
    UnifiedAttention,
    page_attention,
    prefill_page_attention,
    ragged_page_attention_v2,
    unified_attention,
)
from ejkernel.modules.serving_decode import (
    DecodeAttention,
    RaggedDecodeAttention,
    decode_attention,
    ragged_decode_attention,
)
from ejkernel.modules.serving_updates import (
    ChunkedPrefillPagedDecode,
    PagedCacheUpdate,
    RaggedPageAttentionv3,
    chunked_prefill_paged_decode,
    paged_cache_update,
    ragged_page_attention_v3,
)
from ejkernel.modules.sparse_attention import (
    BlockSparseAttention,
    BlockSparseLayout,
    block_sparse_layout,
    blocksparse_attention,
)

FUNCTIONS = (
    "attention",
    "blocksparse_attention",
    "chunked_prefill_paged_decode",
    "decode_attention",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "multi_head_latent_attention",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "page_attention",
    "paged_cache_update",
    "prefill_page_attention",
    "ragged_decode_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
    "unified_attention",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Attention",
    "BlockSparseAttention",
    "BlockSparseLayout",
    "ChunkedPrefillPagedDecode",
    "DecodeAttention",
    "Executor",
    "FlashAttention",
    "FlashAttnVarlen",
    "FlashMLA",
    "GroupedMatmul",
    "LayerNorm",
    "LlamaRope",
    "LlamaRotaryEmbedding",
    "MeanPooling",
    "MultiHeadLatentAttention",
    "MultiLatentRaggedPageAttention",
    "MultiLatentRaggedPageAttentionV2",
    "PageAttention",
    "PagedCacheUpdate",
    "PrefillPageAttention",
    "RaggedDecodeAttention",
    "RaggedPageAttentionv2",
    "RaggedPageAttentionv3",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "UnifiedAttention",
    "attention",
    "block_sparse_layout",
    "blocksparse_attention",
    "chunked_prefill_paged_decode",
    "create_default_executor",
    "decode_attention",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "multi_head_latent_attention",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "page_attention",
    "paged_cache_update",
    "prefill_page_attention",
    "ragged_decode_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
    "unified_attention",
]
