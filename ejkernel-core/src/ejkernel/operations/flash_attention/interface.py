"""Contract of `flash_attention`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ejkernel._arrays import ArraySpec
from ejkernel.operation import Call


class FlashAttentionInputs(NamedTuple):
    """Canonical arrays. Query head h reads key head h // (H // K).

    query `[B, T, H, D]`; key `[B, S, K, D]`; value `[B, S, K, V]`; bias floating and mask bool (True = visible), both
    `[B|1, H|1, T|1, S|1]`; segments and positions int32 `[B|1, T]` and `[B|1, S]`: a pair is visible only if its segments are
    equal and not negative; positions replace indices in causal, window and chunk masks; sinks `[B|1, H, n]`: logits that take
    part in the denominator only; dropout_streams uint32 `[B, H, 2]`, see `dropout`.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    query_segments: Any = None
    key_segments: Any = None
    query_positions: Any = None
    key_positions: Any = None
    sinks: Any = None
    dropout_streams: Any = None


class FlashAttentionOutputs(NamedTuple):
    """out `[B, T, H, V]` in the query's dtype; lse float32 `[B, T, H]`, natural log, sinks included, -inf for a row that sees
    nothing. lse is public when asked for and a residual otherwise."""

    out: Any
    lse: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionCall(Call):
    """Static facts. Query i sits at position `i + query_offset` and key j at position j unless position arrays are given.

    Attributes:
        scale: factor on `query . key`.
        causal: a key is visible up to the query's position.
        query_offset: position of query 0; S - T for bottom-right alignment.
        window: `(left, right)`: keys at most `left` positions before and `right` after the query, inclusive; None = unlimited.
        chunk_size: only keys of the query's own chunk of this many positions are visible.
        prefix: keys at positions below it are exempt from `causal`.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)` after scale and bias, before masks.
        dropout_rate: probability of dropping each attention weight; survivors are divided by `1 - dropout_rate`.
        normalize_output: False returns `sum_j exp(L_ij - m_i) v_j`, m_i the row's largest logit (sinks included), held constant
            under differentiation.
        logits_dtype: `query . key` is rounded to this dtype before anything else is done with it.
        precision: of both products: None (full precision of the inputs' dtype), or "default", "high", "highest".
        return_lse: lse is a public output.
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    bias: ArraySpec | None = None
    mask: ArraySpec | None = None
    query_segments: ArraySpec | None = None
    key_segments: ArraySpec | None = None
    query_positions: ArraySpec | None = None
    key_positions: ArraySpec | None = None
    sinks: ArraySpec | None = None
    dropout_streams: ArraySpec | None = None
    scale: float
    causal: bool = False
    query_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    prefix: int | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    normalize_output: bool = True
    logits_dtype: str = "float32"
    precision: str | None = None
    return_lse: bool = False
