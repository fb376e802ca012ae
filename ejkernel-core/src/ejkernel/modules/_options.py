"""Keyword arguments that overloads of several files share, for static checkers; a test holds them to the signatures."""

from __future__ import annotations

from typing import TypedDict

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


class VisibilityOptions(TypedDict, total=False):
    """What a query sees, beside causality."""

    mask_info: MaskInfo | None
    sliding_window: t.Window | None
    chunk_size: t.TracedCount | None


class PagedOptions(TypedDict, total=False):
    """Of attention over pages."""

    softmax_scale: t.Scalar | None
    sliding_window: t.Window | None
    chunk_size: t.TracedCount | None
    logits_soft_cap: t.Number | None
    k_scale: t.StoredScale | None
    v_scale: t.StoredScale | None
    layout: t.CacheLayout


class RecurrenceOptions(DispatchOptions, total=False):
    """Of `rwkv6`."""

    softmax_scale: t.Scalar | None
    reverse: t.Flag


class ShardedRecurrenceOptions(RecurrenceOptions, ShardingOptions, total=False):
    """Of `recurrent_attention`, `gla_attention` and `retention`."""


class SharedDeltaOptions(ShardingOptions, total=False):
    """Of delta rules that may be split over devices."""

    softmax_scale: t.Scalar | None
    use_qk_l2norm: t.Flag
    use_chunked: t.Flag
    chunk_size: t.Count | None
    seg_ids: t.SegmentIds | None
    cu_seqlens: t.CumulativeLengths | None
