"""Next tokens drawn from logits."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.errors import invalid
from ejkernel.modules._class_api import class_api
from ejkernel.operations.sample_tokens.interface import OPERATION as _SAMPLE_TOKENS

__all__ = ["SampleTokens", "sample_tokens"]


@overload
def sample_tokens(
    logits: t.Logits,
    key: t.TokenKeys,
    *,
    temperature: t.PerToken = 1.0,
    top_k: t.CountPerToken | None = None,
    top_p: t.PerToken | None = None,
    min_p: t.PerToken | None = None,
    token_mask: t.Where | None = None,
    return_logprobs: Literal[False] = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SampledTokens: ...
@overload
def sample_tokens(
    logits: t.Logits,
    key: t.TokenKeys,
    *,
    temperature: t.PerToken = 1.0,
    top_k: t.CountPerToken | None = None,
    top_p: t.PerToken | None = None,
    min_p: t.PerToken | None = None,
    token_mask: t.Where | None = None,
    return_logprobs: Literal[True],
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> tuple[t.SampledTokens, t.SampledLogprobs]: ...
@overload
def sample_tokens(
    logits: t.Logits,
    key: t.TokenKeys,
    *,
    temperature: t.PerToken = 1.0,
    top_k: t.CountPerToken | None = None,
    top_p: t.PerToken | None = None,
    min_p: t.PerToken | None = None,
    token_mask: t.Where | None = None,
    return_logprobs: t.Flag,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SampledTokens | tuple[t.SampledTokens, t.SampledLogprobs]: ...
@public()
def sample_tokens(
    logits: t.Logits,
    key: t.TokenKeys,
    *,
    temperature: t.PerToken = 1.0,
    top_k: t.CountPerToken | None = None,
    top_p: t.PerToken | None = None,
    min_p: t.PerToken | None = None,
    token_mask: t.Where | None = None,
    return_logprobs: t.Flag = False,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.SampledTokens | tuple[t.SampledTokens, t.SampledLogprobs]:
    """Draw a token for each row of logits: by the softmax of `logits / temperature` over the tokens that the filters keep.

    The filters apply in this order: top_k, then top_p to what is left, then min_p. Tokens with equal logits are kept or dropped
    together. Each setting is one number or one for each row, and may be traced.

    A row draws the same token on every platform, whatever the other rows hold; with a key for each row, wherever it stands.
    A row with a NaN, or without a logit above -inf, gives -1. There is no gradient, and differentiating is refused.

    Args:
        logits: `[..., V]`, float32, bfloat16 or float16; inside in float32.
        key: a key of `jax.random`, typed or raw, or keys `[...]`, one for each row.
        temperature: >= 0; 0 takes the first of the largest logits.
        top_k: keep the k largest. An int is part of the program; an array is not, and below 1 keeps all. None = all.
        top_p: in [0, 1]: keep the fewest of the largest whose probabilities sum to it, at least one. None = 1.
        min_p: in [0, 1]: keep those at least that probable, next to the most probable. None = 0.
        token_mask: bool, broadcastable to logits: True = may be drawn. What others hold, NaN included, does not matter.
        return_logprobs: also return the log-probability with which each token was drawn: after temperature and filters.

    Returns:
        int32 `[...]`; with return_logprobs also float32 `[...]`, NaN beside -1.

    Raises:
        TypeError: a dtype does not fit, or the call is differentiated.

    Source: order of the filters as in Hugging Face transformers; vLLM applies min_p before top_k. Nucleus sampling (top_p):
        Holtzman et al., 2020; min_p: Nguyen et al., 2024.
    """
    arrays, options, run = split(locals(), "logits key temperature top_k top_p min_p token_mask")
    if isinstance(top_k, (int, np.integer)) and not isinstance(top_k, bool):
        if top_k < 1:
            raise invalid("top_k", top_k, "an int of at least 1", remedy="None keeps every token")
        options["static_top_k"] = int(arrays.pop("top_k"))
    return _SAMPLE_TOKENS.invoke(arrays, options, **run)


SampleTokens = class_api("SampleTokens", sample_tokens)
