"""Entry point to `linear_recurrence` for state-space models: Mamba-2, and what Mamba-3 shares with it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call.arrays import statistics_dtype
from ejkernel.call.records import Bound
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.packed import segment_starts, taking_part, zero_outside
from ejkernel.operations.common.step_sizes import step_sizes
from ejkernel.operations.linear_recurrence.interface import OPERATION
from ejkernel.utils.checks import check_compute, check_shape

_FORGETS = -1000.0
"""A log decay whose exponential is 0 in float64 too."""


def state_space(
    *,
    x: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt: Any,
    initial_state: Any,
    dt_bias: Any,
    seg_ids: Any,
    cu_seqlens: Any,
    n_groups: int | None,
    precision: Any,
    dt_softplus: bool,
) -> Bound:
    """Canonicalise Mamba-2 as a linear recurrence: query C, key B, value x scaled by dt, log decay A dt, skip D."""
    check_compute("x", x, ndim=4)
    check_groups(x, B, C, n_groups)
    check_compute("dt", dt)
    check_shape("dt", dt, x.shape[:3], "[B, T, H]")
    part = taking_part(seg_ids, cu_seqlens, x, "x")
    _check_per_head(x, A, B, D, initial_state, cu_seqlens)
    query, key = C, B
    if part is not None:  # before any product, whose gradient would be 0 * NaN
        x, query, key, dt = zero_outside(part, x, query, key, dt)
    steps = steps_taken(dt, dt_bias, dt_softplus, x, part)
    decay = log_decays(steps, A[None, None])
    if seg_ids is not None:
        decay = jnp.where(segment_starts(seg_ids)[1][..., None], jnp.full_like(decay, _FORGETS), decay)
    bound = OPERATION.canonicalise(
        query,
        key,
        x,
        decay,
        value_scale=steps,
        skip=None if D is None else D.astype(steps.dtype),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        softmax_scale=1.0,
        return_state=True,
        transposed_state=True,
        precision=precision,
    )

    def finish(outputs: Any) -> Any:
        out, state = bound.finish(outputs)
        batch, length, heads, channels = x.shape
        shape = batch, length, heads * channels
        # A mesh has no rule for a reshape of nothing.
        return out.reshape(shape) if channels else jnp.zeros(shape, out.dtype), state

    return Bound(bound.call, bound.inputs, finish)


def steps_taken(dt: Any, dt_bias: Any, dt_softplus: bool, x: Any, part: Any) -> Any:
    """The step sizes `[B,T,H]` in the dtype of states, 0 at tokens that take no part: bias and softplus leave no zeros."""
    steps = step_sizes(dt, dt_bias, dt_softplus, x, "H").astype(statistics_dtype(str(x.dtype)))
    return steps if part is None else zero_outside(part, steps)[0]


def log_decays(steps: Any, rates: Any) -> Any:
    """Steps times rates <= 0, with the lowest finite number for -inf, which times a step of 0 would be NaN."""
    return steps * jnp.maximum(rates.astype(steps.dtype), jnp.finfo(steps.dtype).min)


def check_groups(x: Any, B: Any, C: Any, n_groups: int | None) -> int:
    """N; B and C are `[B,T,G,N]`, and G divides the heads of x."""
    if n_groups is not None and (isinstance(n_groups, bool) or not isinstance(n_groups, int)):
        raise wrong_type("n_groups", repr(n_groups), "an int or None")
    for name, array in (("B", B), ("C", C)):
        check_compute(name, array, ndim=4)
        if n_groups is not None and array.shape[2] != n_groups:
            raise invalid(name, f"{array.shape[2]} groups", f"n_groups = {n_groups}")
    groups, width = B.shape[2:]
    for name, array in (("B", B), ("C", C)):
        check_shape(name, array, (*x.shape[:2], groups, width), "[B, T, G, N] as x and B")
    if groups == 0 or x.shape[2] % groups:
        raise invalid("B", f"{groups} groups", f"a divisor of the {x.shape[2]} heads of x")
    return width


def _check_per_head(x: Any, A: Any, B: Any, D: Any, initial_state: Any, cu_seqlens: Any) -> None:
    """Refuse rates, skips and states that do not fit x `[B,T,H,P]` and B `[B,T,G,N]`."""
    (batch, _, heads, channels), width = x.shape, B.shape[3]
    per_head: dict[str, tuple[Any, tuple[int, ...], str]] = {"A": (A, (heads,), "[H]")}
    if D is not None:
        check_compute("D", D)
        per_head["D"] = (D, (heads, channels), "[H, P]") if D.ndim == 2 else (D, (heads,), "[H]")
    if initial_state is not None:
        count, meaning = (batch, "[B, H, P, N]") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "[n, H, P, N]")
        per_head["initial_state"] = (initial_state, (count, heads, channels, width), meaning)
    for name, (array, shape, meaning) in per_head.items():
        check_compute(name, array)
        check_shape(name, array, shape, meaning)
