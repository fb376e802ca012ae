"""The optional fields of each call that the kernels honour; core refuses a call that says more. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

ACCEPTS: Mapping[str, tuple[str, ...]] = {
    "flash_attention": (
        "bias",
        "mask",
        "query_segments",
        "key_segments",
        "query_positions",
        "key_positions",
        "sinks",
        "dropout_streams",
        "causal",
        "query_offset",
        "window",
        "chunk_size",
        "prefix",
        "soft_cap",
        "dropout_rate",
        "normalize_output",
        "logits_dtype",
        "precision",
        "return_lse",
    ),
    "grouped_matmul": (
        "group_offset",
        "existing_out",
        "rhs_scale",
        "bias",
        "transpose_rhs",
        "precision",
    ),
    "layer_norm": (
        "scale",
        "epsilon",
        "scale_offset",
        "offset",
    ),
    "linear_recurrence": (
        "g",
        "g_gamma",
        "gk",
        "initial_state",
        "cu_seqlens",
        "scale",
        "reverse",
        "return_state",
        "precision",
    ),
    "mean_pooling": ("cu_seqlens",),
    "paged_attention": (
        "value_pages",
        "sinks",
        "alibi_slopes",
        "qq_bias",
        "key_scale",
        "value_scale",
        "layout",
        "key_heads",
        "causal",
        "window",
        "soft_cap",
        "precision",
        "return_lse",
    ),
    "paged_cache_update": (
        "value_pages",
        "key_scale",
        "value_scale",
        "layout",
    ),
    "rms_norm": (
        "scale",
        "epsilon",
        "scale_offset",
        "offset",
    ),
    "rope": (
        "interleaved",
        "heads_first",
        "key",
    ),
    "softmax": (
        "where",
        "scale",
    ),
}
"""Operation -> fields."""
