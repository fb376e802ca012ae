"""Where the sequences of a `causal_conv1d` begin and end, as arrays that may be traced; platforms share it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call.arrays import statistics_dtype
from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall, CausalConv1dInputs


class Runs(NamedTuple):
    """Attributes:
    seen: how many tokens of its own sequence each token has before it `[1 or b, t]`; -1 outside of all.
    owner: the state that stands before its sequence `[1 or b, t]`; -1 where none does.
    first: first token and the one after the last `[1 or b, n]`, of the run that each state stands before.
    last: the same of each state's last run.
    """

    seen: Any
    owner: Any
    first: tuple[Any, Any]
    last: tuple[Any, Any]


def runs_of(call: CausalConv1dCall, inputs: CausalConv1dInputs) -> Runs | None:
    """The runs of a call; None where every row of the batch is one sequence."""
    length = call.x.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)[None]
    if inputs.cu_seqlens is not None:
        return _packed(inputs.cu_seqlens, tokens)
    return None if inputs.seg_ids is None or length == 0 else _segmented(inputs.seg_ids, tokens)


def _packed(bounds: Any, tokens: Any) -> Runs:
    count = bounds.shape[1] - 1
    ends = bounds[:, :-1], bounds[:, 1:]
    owner = jax.vmap(lambda row: jnp.searchsorted(row, tokens[0], side="right").astype(jnp.int32))(bounds) - 1
    inside = (owner >= 0) & (owner < count)
    starts = jnp.take_along_axis(bounds, jnp.clip(owner, 0, count), axis=1)
    return Runs(jnp.where(inside, tokens - starts, -1), jnp.where(inside, owner, -1), ends, ends)


def _segmented(ids: Any, tokens: Any) -> Runs:
    length = tokens.shape[1]
    edge = jnp.ones_like(ids[:, :1], bool)
    differ = ids[:, 1:] != ids[:, :-1]
    starts = jax.lax.cummax(jnp.where(jnp.concatenate([edge, differ], axis=1), tokens, 0), axis=1)
    stops = jax.lax.cummin(jnp.where(jnp.concatenate([differ, edge], axis=1), tokens + 1, length), axis=1, reverse=True)
    member = ids >= 0
    some = jnp.any(member, axis=1, keepdims=True)

    def run(token: Any) -> tuple[Any, Any]:
        start, stop = (jnp.take_along_axis(edges, token[:, None], axis=1) for edges in (starts, stops))
        return jnp.where(some, start, 0), jnp.where(some, stop, 0)

    first = run(jnp.argmax(member, axis=1))
    last = run(length - 1 - jnp.argmax(member[:, ::-1], axis=1))
    return Runs(
        jnp.where(member, tokens - starts, -1),
        jnp.where(member & (starts == first[0]), 0, -1),
        first,
        last,
    )


def last_inputs(call: CausalConv1dCall, x: Any, state: Any, runs: Runs | None) -> Any:
    """The last w - 1 inputs `[b, n, w - 1, c]` of each last run; before it, the state if that run is the first, or 0."""
    before, dtype = call.width - 1, statistics_dtype(x.dtype)
    batch, length, channels = x.shape
    if runs is None:
        earlier = jnp.zeros((batch, before, channels), x.dtype) if state is None else state[:, 0].astype(x.dtype)
        return jnp.concatenate([earlier, x[:, max(length - before, 0) :]], axis=1)[:, None, -before:]
    shape = (batch, call.sequences)
    (first, _), (start, stop) = ([jnp.broadcast_to(edge, shape)[..., None] for edge in run] for run in (runs.first, runs.last))
    token = stop - before + jnp.arange(before, dtype=jnp.int32)[None, None]
    pick = jax.vmap(lambda rows, at: rows.at[at].get(mode="fill", fill_value=0))
    if length == 0:  # JAX reads nothing from arrays without rows, not even what to fill with
        x = jnp.zeros((batch, 1, channels), x.dtype)
    final = pick(x.astype(dtype), jnp.where(token >= start, token, length))
    if state is not None:
        row = jnp.where((token < start) & (start == first), before + token - start, before)
        final = final + jax.vmap(pick)(state.astype(dtype), row)
    return final.astype(x.dtype)
