"""What the kernels are compiled for: the part that each array plays in one walk over the tokens, as one constant."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel_triton._numerics import DotPrecision, dot_precision


@dataclasses.dataclass(frozen=True)
class RecurrenceParams:
    """One walk: `S = decay S + k v^T`, `out = S^T q`, for arrays that need not be the call's query, key and value.

    The gradients are walks too: that of query has d_out, value and key in these parts, that of key has value, d_out and query, that
    of value has key, query and d_out; the last two go back in time.

    Attributes:
        heads: H.
        query_heads, key_heads, value_heads, own_heads: of the arrays in these parts; own is the array whose gradient it is.
        width, channels: of query and key, of value.
        decay: "none", "scalar" (per head), "key" (per channel of key), "value" (per channel of value).
        g_heads, gamma_heads: of g and g_gamma; 0 where there is none.
        gamma_batch: whether g_gamma has a row per member of the batch.
        gk_heads: of the decays per channel; 0 where there are none.
        exact_logs: whether decays per channel are numbers that products in bfloat16 take whole.
        fine: whether sums of decays keep more digits than bfloat16 needs.
        back: whether tokens go back in time.
        reverse: whether time runs from the last token to the first.
        packed, shared: whether a table says where segments lie, and whether all members of the batch have the same.
        transposed: whether states lie in memory as `[value, key]`.
        scale, read_scale, update_scale: of the products within a chunk, of what is read from the state, of what is added to it.
        precision: of products of float32.
        wide: whether scores and states are multiplied as TF32, for float16 does not hold them.
    """

    heads: int
    query_heads: int
    key_heads: int
    value_heads: int
    own_heads: int
    width: int
    channels: int
    decay: str
    g_heads: int
    gamma_heads: int
    gamma_batch: bool
    gk_heads: int
    exact_logs: bool
    hi_lo: bool
    back: bool
    reverse: bool
    packed: bool
    shared: bool
    transposed: bool
    scale: float
    read_scale: float
    update_scale: float
    precision: str
    wide: bool


def product_precision(call: LinearRecurrenceCall) -> DotPrecision:
    """Three products of TF32 are as good as one of float32 where sums are in float32; only "highest" asks for the latter."""
    requested = dot_precision(call.precision, call.query.dtype)
    return "tf32x3" if requested == "ieee" and call.precision is None and call.query.dtype == "float32" else requested


def forward_params(call: LinearRecurrenceCall) -> RecurrenceParams:
    """The walk of the forward phase."""
    per_channel = call.gk is not None
    scalar = call.g is not None or call.g_gamma is not None
    gamma = call.g_gamma
    logs = None if call.gk is None else "float32" if scalar else call.gk.dtype
    return RecurrenceParams(
        heads=call.heads[1],
        query_heads=call.query.shape[2],
        key_heads=call.key.shape[2],
        value_heads=call.value.shape[2],
        own_heads=call.query.shape[2],
        width=call.query.shape[3],
        channels=call.value.shape[3],
        decay="key" if per_channel else "scalar" if scalar else "none",
        g_heads=0 if per_channel or call.g is None else call.g.shape[2],
        gamma_heads=0 if per_channel or gamma is None else gamma.shape[1],
        gamma_batch=gamma is not None and gamma.shape[0] > 1,
        gk_heads=0 if call.gk is None else call.heads[1] if scalar else call.gk.shape[2],
        exact_logs=logs == "bfloat16",
        hi_lo=call.query.dtype != "bfloat16",
        back=False,
        reverse=call.reverse,
        packed=call.cu_seqlens is not None,
        shared=call.cu_seqlens is not None and call.cu_seqlens.shape[0] == 1,
        transposed=False,
        scale=call.scale,
        read_scale=call.scale,
        update_scale=1.0,
        precision=product_precision(call),
        wide=call.query.dtype == "float16",
    )


def query_gradient_params(params: RecurrenceParams) -> RecurrenceParams:
    """d_query: queries d_out, keys value, values key; the state is that of the forward phase, the other way round."""
    return dataclasses.replace(
        params,
        query_heads=params.heads,
        key_heads=params.value_heads,
        value_heads=params.key_heads,
        own_heads=params.query_heads,
        width=params.channels,
        channels=params.width,
        decay="value" if params.decay == "key" else params.decay,
        transposed=True,
    )


def key_gradient_params(params: RecurrenceParams) -> RecurrenceParams:
    """d_key: queries value, keys d_out, values query; the state is the gradient of the state, the other way round."""
    return dataclasses.replace(
        value_gradient_params(params),
        query_heads=params.value_heads,
        key_heads=params.heads,
        value_heads=params.query_heads,
        own_heads=params.key_heads,
        width=params.channels,
        channels=params.width,
        decay="value" if params.decay == "key" else params.decay,
        transposed=True,
    )


def value_gradient_params(params: RecurrenceParams) -> RecurrenceParams:
    """d_value: queries key, keys query, values d_out; the state is the gradient of the state."""
    return dataclasses.replace(
        params,
        query_heads=params.key_heads,
        key_heads=params.query_heads,
        value_heads=params.heads,
        own_heads=params.value_heads,
        back=True,
        read_scale=1.0,
        update_scale=params.scale,
    )


def prepared_params(params: RecurrenceParams) -> RecurrenceParams:
    """The same over queries and keys that hold their decays per channel and the scale, for all heads."""
    if params.decay != "key":
        return params
    return dataclasses.replace(
        params, query_heads=params.heads, key_heads=params.heads, scale=1.0, read_scale=1.0, update_scale=1.0
    )
