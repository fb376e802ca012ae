"""Pooling over a sequence."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel.modules._class_api import class_form
from ejkernel.operations.flash_attention.bind import as_count
from ejkernel.operations.mean_pooling.interface import OPERATION as _MEAN_POOLING


def mean_pooling(
    x: t.Pooled,
    cu_seqlens: t.CumulativeLengths | None = None,
    *,
    chunk_size: t.Count | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.PooledOutput:
    """Mean over the tokens of each sequence; 0 for a sequence without tokens.

    Args:
        x: `[B,T,H,D]` or `[B,T,D]`, float32, bfloat16 or float16; any length. With cu_seqlens B = 1, or the axis is left out:
            `[N,H,D]` or `[N,D]`. Three axes of which the first is 1 are `[1,T,D]`.
        cu_seqlens: cumulative lengths of packed sequences, integers `[n + 1]`, from 0 to at most T; may be traced. Sequence i
            is the tokens from cu_seqlens[i] to cu_seqlens[i + 1]; tokens after the last one take no part, whatever they hold.
            None: each row of the batch is one sequence.
        chunk_size: hint: the tokens that a platform may sum at a time; it does not change the result.
        platform: None or "auto", one platform, or several in order of preference.
        cfg: config override for the chosen implementation.

    Returns:
        `[B,H,D]` or `[B,D]`; with cu_seqlens `[n,H,D]` or `[n,D]`. In the dtype of x, summed in float32.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.
        TypeError: x is not of a floating type, or cu_seqlens not of integers.
        NoKernelError: no admitted platform supports the call.
    """
    if chunk_size is not None:
        as_count("chunk_size", chunk_size, 1)
    return _MEAN_POOLING.invoke({"x": x, "cu_seqlens": cu_seqlens}, {}, platform=platform, cfg=cfg)


MeanPooling = class_form("MeanPooling", mean_pooling)
