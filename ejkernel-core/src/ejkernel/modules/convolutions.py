"""The short convolution in front of linear attention and state-space layers."""

from __future__ import annotations

from typing import Literal, overload

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.modules._class_api import class_api
from ejkernel.operations.causal_conv1d.interface import OPERATION as _CAUSAL_CONV1D

__all__ = ["CausalConv1d", "causal_conv1d"]


@overload
def causal_conv1d(
    x: t.SequenceChannels,
    weight: t.ConvFilters,
    bias: t.Channels | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: t.ConvState | None = None,
    return_state: Literal[False] = False,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceChannelsOutput: ...


@overload
def causal_conv1d(
    x: t.SequenceChannels,
    weight: t.ConvFilters,
    bias: t.Channels | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: t.ConvState | None = None,
    return_state: Literal[True],
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SequenceChannelsOutput, t.NewConvState]: ...


@overload
def causal_conv1d(
    x: t.SequenceChannels,
    weight: t.ConvFilters,
    bias: t.Channels | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: t.ConvState | None = None,
    return_state: t.Flag,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceChannelsOutput | tuple[t.SequenceChannelsOutput, t.NewConvState]: ...


@public()
def causal_conv1d(
    x: t.SequenceChannels,
    weight: t.ConvFilters,
    bias: t.Channels | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: t.ConvState | None = None,
    return_state: t.Flag = False,
    seg_ids: t.SegmentIds | None = None,
    cu_seqlens: t.CumulativeLengths | None = None,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SequenceChannelsOutput | tuple[t.SequenceChannelsOutput, t.NewConvState]:
    """A causal convolution along T with one filter per channel: `out_t = act(bias + sum_j weight[:, j] x_(t - W + 1 + j))`.

    Args:
        x: `[B,T,C]`, float32, bfloat16 or float16; any length, 0 included.
        weight: `[C,W]`, W >= 2, 4 in most models; the last column meets the token itself.
        bias: `[C]`, or None.
        activation: "silu" (also called swish), or None.
        initial_state: the W - 1 inputs before the first token, oldest first, `[B,W-1,C]`, or `[n,W-1,C]` with cu_seqlens; None =
            zeros.
        return_state: also return the last W - 1 inputs, the state for the next call: a call of one token is a decoding step.
        seg_ids: integers `[B,T]` or `[1,T]`. A token sees those before it with no other id between them. Tokens with an id below 0
            are padding: they take no part, whatever they hold, get 0, and separate their neighbours; the first run of one id
            starts from initial_state.
        cu_seqlens: integers `[n + 1]`, not decreasing, from 0 to at most T; may be traced; B = 1. Sequence i is the tokens
            from cu_seqlens[i] to cu_seqlens[i + 1]; tokens after the last one take no part, whatever they hold, and get 0.

    Returns:
        `[B,T,C]` in the dtype of x, summed in float32; with return_state a pair with the state, shaped like initial_state.

    Raises:
        ValueError: a shape or an activation does not fit, or cu_seqlens (if concrete) decreases, does not start at 0 or ends
            beyond T.

    Source: Fu et al., Hungry Hungry Hippos: Towards Language Modeling with State Space Models, 2023 (the shift); Gu and Dao,
    Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
    """
    arrays, options, run = split(locals(), "x weight bias initial_state seg_ids cu_seqlens")
    return _CAUSAL_CONV1D.invoke(arrays, options, **run)


CausalConv1d = class_api("CausalConv1d", causal_conv1d)
