"""Pooling over a sequence."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.modules._class_api import class_api
from ejkernel.operations.common.options import as_count
from ejkernel.operations.mean_pooling.interface import OPERATION as _MEAN_POOLING
from ejkernel.operations.mean_pooling.masked import masked_mean

__all__ = ["MeanPooling", "mean_pooling"]


@public()
def mean_pooling(
    x: t.Pooled,
    cu_seqlens: t.CumulativeLengths | None = None,
    *,
    attention_mask: t.TokenMask | None = None,
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
        attention_mask: `[B,T]`, bool or 0 and 1: which tokens count; the others take no part, whatever they hold. A row without
            any gives 0. None beside cu_seqlens.
        chunk_size: hint: the tokens that a platform may sum at a time; it does not change the result.

    Returns:
        `[B,H,D]` or `[B,D]`; with cu_seqlens `[n,H,D]` or `[n,D]`. In the dtype of x, summed in float32.

    Raises:
        ValueError: a shape does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends beyond T.
        TypeError: x is not of a floating type, or cu_seqlens not of integers.
    """
    arrays, options, run = split(locals(), "x cu_seqlens", own="attention_mask chunk_size")
    if chunk_size is not None:
        as_count("chunk_size", chunk_size, 1)
    if attention_mask is None:
        return _MEAN_POOLING.invoke(arrays, options, **run)
    return _MEAN_POOLING.invoke({**arrays, "attention_mask": attention_mask}, options, form=masked_mean, **run)


MeanPooling = class_api("MeanPooling", mean_pooling)
