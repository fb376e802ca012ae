"""The static parameters of one recurrence over the tokens, as one `tl.constexpr`: kernels are specialised for them."""

from __future__ import annotations

import dataclasses

from ejkernel.call import ArraySpec
from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel_triton._numerics import DotPrecision, dot_precision

WIDEST_VALUE = 256
"""Channels of value that one program's recurrence may have."""


@dataclasses.dataclass(frozen=True)
class RecurrenceParams:
    """One recurrence: `S = decay S + k v^T`, `out = S^T q`. Its query, key and value need not be the call's.

    The gradients are recurrences too: that of query uses d_out, value and key in these roles, that of key value, d_out and
    query, that of value key, query and d_out. The last two run backward in time.

    Attributes:
        heads: H.
        query_heads, key_heads, value_heads, own_heads: of the arrays in these roles; own is the array whose gradient is
            computed.
        width, channels: of query and key, of value.
        decay: "none", "scalar" (per head), "key" (per channel of key), "value" (per channel of value).
        g_heads, gamma_heads: of g and g_gamma; 0 if absent.
        gamma_batch: whether g_gamma has a row per batch member.
        gk_heads: of the decays per channel; 0 if absent.
        value_scale_heads: of the factors of the values that states take; 0 if absent.
        skip_heads, skip_batch: of how much of the value itself outputs take, 0 if absent, and whether it has a row per batch
            member.
        exact_logs: whether bfloat16 MMA operands represent the decays per channel exactly.
        hi_lo: whether sums of log decays are kept as hi + lo, for more precision than bfloat16 needs.
        back: whether the recurrence runs backward in time.
        reverse: whether time runs from the last token to the first (the call's `reverse`).
        packed, shared: whether a table gives the segments of packed sequences, and whether the batch shares it.
        transposed: whether states are stored as `[value, key]`.
        scale, read_scale, update_scale: of the scores within a chunk, of reads from the state, of updates to it.
        precision: `input_precision` of float32 dots.
        wide: whether scores and states are TF32 operands, as they exceed float16's range.
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
    value_scale_heads: int
    skip_heads: int
    skip_batch: bool
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


def takes_scales(call: LinearRecurrenceCall) -> bool:
    """Whether the kernels take value_scale and skip, which is then of whole heads."""
    per_head = call.skip is None or call.skip.shape[2] == 1
    return per_head and call.gk is None and call.bonus is None and call.value.shape[3] <= WIDEST_VALUE


def as_computed(call: LinearRecurrenceCall, *, backward: bool) -> LinearRecurrenceCall:
    """The call in float32 where values times factors are arrays that float16 does not hold: an infinity among later ones would make
    the gradients of earlier tokens NaN."""
    if call.query.dtype != "float16" or call.value_scale is None or (takes_scales(call) and not backward):
        return call
    specs = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    wide = {
        name: dataclasses.replace(spec, dtype="float32")
        for name, spec in specs.items()
        if isinstance(spec, ArraySpec) and spec.dtype == "float16"
    }
    return dataclasses.replace(call, **wide, precision=None)


def product_precision(call: LinearRecurrenceCall) -> DotPrecision:
    """3xTF32 is as accurate as float32 with float32 accumulation; only "highest" requests the latter."""
    requested = dot_precision(call.precision, call.query.dtype)
    return "tf32x3" if requested == "ieee" and call.precision is None and call.query.dtype == "float32" else requested


def forward_params(call: LinearRecurrenceCall) -> RecurrenceParams:
    """The recurrence of the forward phase."""
    per_channel = call.gk is not None
    scalar = call.g is not None or call.g_gamma is not None
    gamma, skip = call.g_gamma, call.skip
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
        value_scale_heads=0 if call.value_scale is None else call.value_scale.shape[2],
        skip_heads=0 if skip is None else skip.shape[1],
        skip_batch=skip is not None and skip.shape[0] > 1,
        exact_logs=logs == "bfloat16",
        hi_lo=call.query.dtype != "bfloat16",
        back=False,
        reverse=call.reverse,
        packed=call.cu_seqlens is not None,
        shared=call.cu_seqlens is not None and call.cu_seqlens.shape[0] == 1,
        transposed=False,
        scale=call.softmax_scale,
        read_scale=call.softmax_scale,
        update_scale=1.0,
        precision=product_precision(call),
        wide=call.query.dtype == "float16",
    )


def query_gradient_params(params: RecurrenceParams) -> RecurrenceParams:
    """d_query: queries d_out, keys value, values key; the state is that of the forward phase, transposed."""
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
    """d_key: queries value, keys d_out, values query; the state is the gradient of the state, transposed."""
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
        value_scale_heads=0,
        skip_heads=0,
        back=True,
        read_scale=1.0,
        update_scale=params.scale,
    )


def prepared_params(params: RecurrenceParams) -> RecurrenceParams:
    """The same with queries and keys that include their decays per channel and the scale, for all heads."""
    if params.decay != "key":
        return params
    return dataclasses.replace(
        params, query_heads=params.heads, key_heads=params.heads, scale=1.0, read_scale=1.0, update_scale=1.0
    )
