"""The optional fields of each call that the kernels honour; core refuses a call that says more. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

ACCEPTS: Mapping[str, tuple[str, ...]] = {
    "add_rms_norm": (
        "scale",
        "epsilon",
        "scale_offset",
    ),
    "block_sparse_attention": (
        "causal",
        "query_offset",
        "window",
        "prefix",
        "soft_cap",
    ),
    "flash_attention": (
        "causal",
        "query_offset",
        "window",
        "prefix",
        "soft_cap",
        "precision",
        "return_lse",
    ),
    "layer_norm": (
        "scale",
        "epsilon",
        "scale_offset",
        "offset",
    ),
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
    "qk_norm_rope": (
        "interleaved",
        "heads_first",
        "query_scale",
        "key_scale",
        "epsilon",
        "scale_offset",
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

ACCEPTS_CUDNN: Mapping[str, tuple[str, ...]] = {
    "block_sparse_attention": (
        "causal",
        "query_offset",
        "window",
    ),
    "flash_attention": (
        "causal",
        "query_offset",
        "window",
        "precision",
        "return_lse",
    ),
}
"""Operation -> fields."""

ACCEPTS_PREFILL = ("value_pages", "sinks", "layout", "key_heads", "causal", "window", "soft_cap", "precision", "return_lse")
"""Fields of `paged_attention` that the kernel for many new tokens honours."""
