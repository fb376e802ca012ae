"""Keyword arguments that overloads of the public functions share, for static checkers; a test holds them to the signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Required, TypedDict

import numpy as np

from ejkernel import typing as t
from ejkernel.masks import MaskInfo


class DispatchOptions(TypedDict, total=False):
    """Who runs the call, and how."""

    platform: t.Platforms
    cfg: t.ConfigLike | None


class ShardingOptions(DispatchOptions, total=False):
    """Over which devices."""

    mesh: t.Mesh | None
    in_specs: t.InSpecs | None
    out_specs: t.OutSpecs | None


class _VisibilityOptions(TypedDict, total=False):
    mask_info: MaskInfo | None
    sliding_window: t.Window | None
    chunk_size: t.TracedCount | None


class _AttentionOptions(_VisibilityOptions, total=False):
    causal_alignment: t.CausalAlignment | None
    logits_soft_cap: t.Number | None
    dropout_prob: t.Number
    dropout_seed: t.Seed | None
    normalize_output: t.Flag
    precision: t.PrecisionLike | None
    logits_dtype: t.DTypeLike | None


class FlashAttentionOptions(_AttentionOptions, ShardingOptions, total=False):
    """Of `flash_attention`."""

    softmax_scale: t.Scalar | None
    causal: t.Flag
    broadcast_dropout: t.Flag


class DotProductOptions(ShardingOptions, total=False):
    """Of `scaled_dot_product_attention`."""

    mask: t.DotProductMask | None
    mask_info: MaskInfo | None
    scale: t.Scalar | None
    softmax_scale: t.Scalar | None
    is_causal: t.Flag
    causal: t.Flag
    query_seq_lengths: t.Lengths | None
    key_value_seq_lengths: t.Lengths | None
    local_window_size: t.Window | None
    sliding_window: t.Window | None
    dropout_prob: t.Number
    dropout_seed: t.Seed | None
    broadcast_dropout: t.Flag
    precision: t.PrecisionLike | None
    init_bias: Callable[[], t.DotProductBias] | None
    implementation: t.DotProductImplementation | None


class VarlenOptions(_AttentionOptions, DispatchOptions, total=False):
    """Of `flash_attn_varlen`."""

    bias: t.PackedBias | None
    softmax_aux: t.PackedSinks | None


class RingOptions(_VisibilityOptions, ShardingOptions, total=False):
    """Of `ring_attention`."""

    causal: t.Flag
    logits_soft_cap: t.Number | None
    softmax_scale: t.Scalar | None
    axis_name: t.AxisNames | None
    fused_backward: t.Flag
    layout: t.SequenceLayout
    strategy: t.SequenceStrategy
    precision: t.PrecisionLike | None


class _PagedOptions(TypedDict, total=False):
    softmax_scale: t.Scalar | None
    sliding_window: t.Window | None
    chunk_size: t.TracedCount | None
    logits_soft_cap: t.Number | None
    k_scale: t.StoredScale | None
    v_scale: t.StoredScale | None
    layout: t.CacheLayout


class UnifiedAttentionOptions(_PagedOptions, ShardingOptions, total=False):
    """Of `unified_attention`."""

    causal: t.Flag
    precision: t.PrecisionLike | None


class PrefillOptions(_PagedOptions, DispatchOptions, total=False):
    """Of `prefill_page_attention`."""

    attn_logits_soft_cap: t.Number | None
    softmax_aux: t.Sinks | None
    mask_value: t.Number | None


class PageAttentionOptions(PrefillOptions, total=False):
    """Of `page_attention`."""

    attn_scale: t.Scalar | None
    scale: t.Scalar | None
    alibi_slopes: t.Slopes | None
    block_size: t.Count | None
    max_context_len: t.Count | None
    num_splits: t.Count | None
    pages_per_compute_block: t.Count | None
    megacore_mode: str | None
    inline_seq_dim: t.Flag


class LatentServingOptions(DispatchOptions, total=False):
    """Of `multi_latent_ragged_page_attention`."""

    softmax_scale: t.Scalar | None
    sliding_window: t.Window | None
    logits_soft_cap: t.Number | None
    mask_value: t.Number | None
    q_scale: t.Scalar | None
    k_scale: t.Scalar | None
    v_scale: t.Scalar | None


class RecurrenceOptions(DispatchOptions, total=False):
    """Of `rwkv6`."""

    softmax_scale: t.Scalar | None
    reverse: t.Flag


class ShardedRecurrenceOptions(RecurrenceOptions, ShardingOptions, total=False):
    """Of `recurrent_attention`, `gla_attention` and `retention`."""


class LightningOptions(ShardedRecurrenceOptions, total=False):
    """Of `lightning_attention`."""

    layer_idx: Required[t.TracedCount]
    num_layers: Required[int | np.integer]
    slopes: t.LayerSlopes


class _DeltaOptions(ShardingOptions, total=False):
    softmax_scale: t.Scalar | None
    use_qk_l2norm: t.Flag
    use_chunked: t.Flag
    chunk_size: t.Count | None
    seg_ids: t.SegmentIds | None
    cu_seqlens: t.CumulativeLengths | None


class DeltaOptions(_DeltaOptions, total=False):
    """Of `gated_delta_rule` and `kernel_delta_attention`."""

    reverse: t.Flag


class DeltaProductOptions(_DeltaOptions, total=False):
    """Of `gated_delta_product`."""

    num_householder: Required[int | np.integer]


class Rwkv7Options(RecurrenceOptions, total=False):
    """Of `rwkv7` and `rwkv7_mul`."""

    initial_state: t.MatrixState | None
    cu_seqlens: t.CumulativeLengths | None
    use_chunked: t.Flag
