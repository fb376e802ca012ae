"""Portable configs: `cfg=FlashAttentionConfig(platform="triton", ...)` means the same on every machine.

`platform` and `backend` are demands. All other fields are hints, None where nothing is said: the implementation that runs uses
those that it has as knobs and refuses illegal values of them; hints for other machines change nothing, as no config ever changes
a result. Fields that do not exist are refused when a config is made.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ejkernel.tuning import BaseOperationConfig, BwdParams, FwdParams

__all__ = [
    "AttentionConfig",
    "BaseOperationConfig",
    "BlockSparseAttentionConfig",
    "BwdParams",
    "FlashAttentionConfig",
    "FwdParams",
    "GatedDeltaRuleConfig",
    "GroupedMatmulConfig",
    "MultiLatentRaggedPageAttentionConfig",
    "MultiLatentRaggedPageAttentionV2Config",
    "RaggedPageAttentionv2Config",
    "RaggedPageAttentionv2TurboQuantConfig",
    "RaggedPageAttentionv3Config",
    "RaggedPageAttentionv3TurboQuantConfig",
    "RingAttentionConfig",
    "ScaledDotProductAttentionConfig",
    "UnifiedAttentionConfig",
]

_SOFTMAX = ("flash_attention",)
_PAGED = ("paged_attention", "paged_cache_update")
_LATENT = ("latent_paged_attention", "paged_cache_update")


@dataclasses.dataclass(frozen=True)
class _PerPhase(BaseOperationConfig):
    """Tile sizes of each phase, as `FwdParams` and `BwdParams` or mappings of their fields."""

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None


@dataclasses.dataclass(frozen=True)
class FlashAttentionConfig(_PerPhase):
    """Of `flash_attention`."""

    operations: ClassVar[tuple[str, ...]] = (*_SOFTMAX, *_PAGED)


@dataclasses.dataclass(frozen=True)
class BlockSparseAttentionConfig(_PerPhase):
    """Of `blocksparse_attention`."""

    operations: ClassVar[tuple[str, ...]] = ("block_sparse_attention",)


@dataclasses.dataclass(frozen=True)
class RingAttentionConfig(_PerPhase):
    """Of `ring_attention`, whose local step is attention."""

    operations: ClassVar[tuple[str, ...]] = _SOFTMAX


@dataclasses.dataclass(frozen=True)
class ScaledDotProductAttentionConfig(BaseOperationConfig):
    """Of `scaled_dot_product_attention`."""

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    operations: ClassVar[tuple[str, ...]] = _SOFTMAX


@dataclasses.dataclass(frozen=True)
class AttentionConfig(ScaledDotProductAttentionConfig):
    """Of `attention`; the tiles of the weights apart from those of the output."""

    weights_block_q: int | None = None
    weights_block_k: int | None = None


@dataclasses.dataclass(frozen=True)
class UnifiedAttentionConfig(BaseOperationConfig):
    """Of `unified_attention`: when and into how many segments a decode step is split, and the shape of a block."""

    seq_threshold_3d: int | None = None
    num_par_softmax_segments: int | None = None
    block_dim: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    operations: ClassVar[tuple[str, ...]] = _PAGED


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv2Config(BaseOperationConfig):
    """Of `ragged_page_attention_v2`: pages and queries of a tile."""

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    operations: ClassVar[tuple[str, ...]] = _PAGED


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv2TurboQuantConfig(RaggedPageAttentionv2Config):
    """Of `ragged_page_attention_v2_turboquant`."""


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv3Config(BaseOperationConfig):
    """Of `ragged_page_attention_v3`: pages and queries of a tile, tokens of a chunk of prefill."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    operations: ClassVar[tuple[str, ...]] = _PAGED


@dataclasses.dataclass(frozen=True)
class RaggedPageAttentionv3TurboQuantConfig(RaggedPageAttentionv3Config):
    """Of `ragged_page_attention_v3_turboquant`."""


@dataclasses.dataclass(frozen=True)
class MultiLatentRaggedPageAttentionConfig(BaseOperationConfig):
    """Of `multi_latent_ragged_page_attention`."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    operations: ClassVar[tuple[str, ...]] = _LATENT


@dataclasses.dataclass(frozen=True)
class MultiLatentRaggedPageAttentionV2Config(BaseOperationConfig):
    """Of `multi_latent_ragged_page_attention_v2`; three numbers are for decode, prefill and mixed batches."""

    chunk_prefill_size: int | None = None
    num_kv_pages_per_block: tuple[int, int, int] | int | None = None
    num_queries_per_block: tuple[int, int, int] | int | None = None
    vmem_limit_bytes: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    operations: ClassVar[tuple[str, ...]] = _LATENT


@dataclasses.dataclass(frozen=True)
class GatedDeltaRuleConfig(BaseOperationConfig):
    """Of `gated_delta_rule`: tokens of a chunk."""

    chunk_size: int | None = None

    operations: ClassVar[tuple[str, ...]] = ("delta_rule",)


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig(BaseOperationConfig):
    """Of `grouped_matmul`: rows, columns and products of a tile; `bypass_xla_tiling` speaks of another library's XLA path."""

    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    bypass_xla_tiling: bool = False

    operations: ClassVar[tuple[str, ...]] = ("grouped_matmul",)
