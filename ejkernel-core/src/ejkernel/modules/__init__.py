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
from ejkernel.modules.block_sparse import BlockSparseAttention, BlockSparseLayout, block_sparse_layout, blocksparse_attention
from ejkernel.modules.collectives import AllGatherMatmul, ReduceScatterMatmul, all_gather_matmul, reduce_scatter_matmul
from ejkernel.modules.latent import FlashMLA, MultiHeadLatentAttention, flash_mla, multi_head_latent_attention
from ejkernel.modules.matmuls import GroupedMatmul, QuantizedMatmul, grouped_matmul, quantized_matmul
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm
from ejkernel.modules.pooling import MeanPooling, mean_pooling
from ejkernel.modules.probabilities import Softmax, softmax
from ejkernel.modules.ring import RingAttention, ring_attention, zigzag_shard, zigzag_unshard
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
from ejkernel.modules.serving_decode import DecodeAttention, RaggedDecodeAttention, decode_attention, ragged_decode_attention
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

FUNCTIONS = (
    "apply_native_sparse_attention",
    "attention",
    "blocksparse_attention",
    "chunked_prefill_paged_decode",
    "decode_attention",
    "deepseek_attn",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "multi_head_latent_attention",
    "native_spare_attention",
    "native_sparse_attention",
    "page_attention",
    "paged_cache_update",
    "prefill_page_attention",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "ring_attention",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
    "unified_attention",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "AllGatherMatmul",
    "ApplyNativeSparseAttention",
    "Attention",
    "BlockSparseAttention",
    "BlockSparseLayout",
    "ChunkedPrefillPagedDecode",
    "DecodeAttention",
    "DeepSeekAttention",
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
    "NativeSparseAttention",
    "PageAttention",
    "PagedCacheUpdate",
    "PrefillPageAttention",
    "QuantizedMatmul",
    "RaggedDecodeAttention",
    "RaggedPageAttentionv2",
    "RaggedPageAttentionv3",
    "ReduceScatterMatmul",
    "RingAttention",
    "RmsNorm",
    "Rope",
    "ScaledDotProductAttention",
    "Softmax",
    "UnifiedAttention",
    "all_gather_matmul",
    "apply_native_sparse_attention",
    "attention",
    "block_sparse_layout",
    "blocksparse_attention",
    "chunked_prefill_paged_decode",
    "create_default_executor",
    "decode_attention",
    "deepseek_attn",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "grouped_matmul",
    "layer_norm",
    "llama_rope",
    "mean_pooling",
    "multi_head_latent_attention",
    "native_spare_attention",
    "native_sparse_attention",
    "page_attention",
    "paged_cache_update",
    "prefill_page_attention",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "reduce_scatter_matmul",
    "ring_attention",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "softmax",
    "unified_attention",
    "zigzag_shard",
    "zigzag_unshard",
]
