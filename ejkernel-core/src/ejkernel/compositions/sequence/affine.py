"""What the tokens of one device do to the state that enters: a linear map of it, plus what they leave by themselves.

Each operation runs once, from zeros where a state enters, and its outputs are corrected by what is linear in that state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.compositions.sequence.carry import Carry
from ejkernel.operations.common.heads import repeat_heads

_LOWEST = -1e30
"""Stands for -inf, which times 0 would be NaN, in products that sum logarithms."""

_CHUNK = 64
"""Tokens whose logarithms one product sums."""


@dataclasses.dataclass(frozen=True)
class Local:
    """This device's tokens by themselves.

    Attributes:
        final: states `[b, n, ...]` after them.
        transition: a pytree `[b, ...]`: the linear map of a state that enters to what is left of it after its last token here.
        apply: `(transition, state [b, ...]) -> state`.
        corrected: `state [b, ...] -> out`, the outputs with the share of a state that enters.
    """

    final: Any
    transition: Any
    apply: Callable[[Any, Any], Any]
    corrected: Callable[[Any], Any]


def delta_rule(request: Any, inputs: Any, carry: Carry) -> Local:
    """The map is a matrix `[b, H, d, d]`, and so is what every query sees through the tokens before it: the rule itself makes
    both, of value 0 and the identity as a state, in d more columns of the same call."""
    width, channels = inputs.key.shape[3], inputs.value.shape[3]
    none = jnp.zeros((*inputs.value.shape[:3], width), inputs.value.dtype)
    wide = request.call.state_dtype
    batch, count, heads = inputs.query.shape[0], request.call.sequences, request.call.heads
    identity = jnp.broadcast_to(jnp.eye(width, dtype=wide), (batch, heads, width, width))
    given = inputs.initial_state
    if given is None:
        given = jnp.zeros((batch, count, heads, width, channels), wide)
    both = jnp.concatenate(
        [carry.initial(given), jnp.broadcast_to(carry.placed(identity), (*given.shape[:-1], width))], axis=-1
    )
    inputs = inputs._replace(value=jnp.concatenate([inputs.value, none], axis=-1), initial_state=both)
    found = _run(request, inputs, return_state=True)
    final, maps = found.final_state[..., :channels], found.final_state[..., channels:]
    out, seen = found.out[..., :channels], found.out[..., channels:]

    def corrected(state: Any) -> Any:
        return (out.astype(wide) + _read(seen, state)).astype(out.dtype)

    kept = jnp.where(carry.entering[..., None, None, None], maps, 0).sum(axis=1)
    return Local(final, kept, lambda matrix, state: _product("bhij,bhjv->bhiv", matrix, state), corrected)


def linear_recurrence(request: Any, inputs: Any, carry: Carry) -> Local:
    """The map is diagonal: decays of key channels `[b, H, d or 1]` and of value channels `[b, H, v]`."""
    call, wide = request.call, request.call.state_dtype
    heads, given = call.heads[1], inputs.initial_state
    given = None if given is None else carry.initial(given)
    found = _run(request, inputs._replace(initial_state=given), return_state=True)
    reached = _reached(inputs, carry)
    rows = None if reached is None else reached[..., None, None]

    def sums(*logarithms: Any) -> Any:
        """Sums `[b, t, H, ...]` of logarithms up to each token, that of the token included."""
        total = sum((repeat_heads(array.astype(wide), heads // array.shape[2], 2) for array in logarithms), jnp.zeros((), wide))
        total = jnp.broadcast_to(total, (*inputs.query.shape[:2], *total.shape[2:]))
        return _running_sums(total if rows is None else jnp.where(rows, total, 0), call.reverse)

    of_key = [array[..., None] for array in (inputs.g,) if array is not None]
    of_key += [] if inputs.g_gamma is None else [inputs.g_gamma[:, None, :, None]]
    of_key += [] if inputs.gk is None else [inputs.gk]
    decays = [sums(*of_key) if of_key else None, None if inputs.gv is None else sums(inputs.gv)]
    edge = 0 if call.reverse else -1
    transition = [None if sum_ is None else jnp.exp(sum_[:, edge]) for sum_ in decays]

    def apply(factors: Any, state: Any) -> Any:
        state = state if factors[0] is None else factors[0][..., None] * state
        return state if factors[1] is None else state * factors[1][:, :, None]

    def corrected(state: Any) -> Any:
        query = repeat_heads(inputs.query, heads // inputs.query.shape[2], 2)
        query = query if rows is None else jnp.where(rows, query, 0)
        before = [None if sum_ is None else jnp.exp(_shifted(sum_, call)) for sum_ in decays]
        query = query if before[0] is None else (query.astype(wide) * before[0]).astype(query.dtype)
        share = call.scale * _read(query, state)
        share = share if before[1] is None else share * before[1]
        return (found.out.astype(wide) + share).astype(found.out.dtype)

    return Local(found.final_state, transition, apply, corrected)


def selective_scan(request: Any, inputs: Any, carry: Carry) -> Local:
    """The map is diagonal: `exp(A sum dt)`, `[b, i, n]`."""
    call, given = request.call, inputs.initial_state
    packed = call.cu_seqlens is not None
    if given is not None:
        given = carry.initial(given if packed else given[:, None])
        given = given if packed else given[:, 0]
    found = _run(request, inputs._replace(initial_state=given))
    wide = found.final_state.dtype
    reached = _reached(inputs, carry)
    steps = inputs.dt.astype(wide)
    steps = _running_sums(steps if reached is None else jnp.where(reached[..., None], steps, 0), False)
    rates = jnp.maximum(inputs.A.astype(wide), jnp.finfo(wide).min)  # -inf times a dt of 0 would be NaN
    kept = jnp.exp(rates * steps[:, -1, :, None])
    if inputs.resets is not None:
        after = jnp.cumsum(inputs.resets, axis=1) > 0
        reached = ~after if reached is None else reached & ~after
        kept = jnp.where(after[:, -1, None, None], 0, kept)
    read = inputs.C if reached is None else jnp.where(reached[..., None], inputs.C, 0)

    @jax.checkpoint
    def share(state: Any, rates: Any, steps: Any, read: Any) -> Any:
        decays = jnp.exp(rates[:, None] * steps[..., None])  # [b, t, i, n], which XLA sums without writing it
        return jnp.sum(decays * state[:, None] * read.astype(wide)[:, :, None], axis=-1)

    def corrected(state: Any) -> Any:
        return (found.out.astype(wide) + share(state, rates, steps, read)).astype(found.out.dtype)

    final = found.final_state if packed else found.final_state[:, None]
    return Local(final, kept, lambda factors, state: factors * state, corrected)


AFFINE: Mapping[str, Callable[[Any, Any, Carry], Local]] = {
    "delta_rule": delta_rule,
    "linear_recurrence": linear_recurrence,
    "selective_scan": selective_scan,
}
"""By operation."""


def _run(request: Any, inputs: Any, **options: Any) -> Any:
    changed = dataclasses.replace(request, call=dataclasses.replace(request.call, **options)).reshaped(inputs)
    return request.operation.run(changed, inputs)


def _reached(inputs: Any, carry: Carry) -> Any:
    """Which tokens `[1, t]` are of the packed sequence that enters; None without packing."""
    if inputs.cu_seqlens is None:
        return None
    places = jnp.arange(inputs[0].shape[1], dtype=jnp.int32)[None, :, None]
    begins, ends = inputs.cu_seqlens[:, None, :-1], inputs.cu_seqlens[:, None, 1:]
    return jnp.any((begins <= places) & (places < ends) & carry.entering[:, None], axis=-1)


def _running_sums(array: Any, reverse: bool) -> Any:
    """Sums along the tokens of `[b, t, ...]`, in the order of the recurrence: within chunks by a product, then of chunks."""
    array = jnp.maximum(array, _LOWEST)
    length = array.shape[1]
    if length % _CHUNK:
        return jnp.flip(jnp.cumsum(jnp.flip(array, 1), axis=1), 1) if reverse else jnp.cumsum(array, axis=1)
    cut = array.reshape(array.shape[0], length // _CHUNK, _CHUNK, -1)
    ones = jnp.tril(jnp.ones((_CHUNK, _CHUNK), array.dtype))
    inside = _product("ij,bnjc->bnic", ones.T if reverse else ones, cut)
    totals = inside[:, :, 0 if reverse else -1]
    totals = jnp.flip(totals, 1) if reverse else totals
    before = jnp.cumsum(jnp.pad(totals[:, :-1], ((0, 0), (1, 0), (0, 0))), axis=1)
    before = jnp.flip(before, 1) if reverse else before
    return (inside + before[:, :, None]).reshape(array.shape)


def _shifted(sums: Any, call: Any) -> Any:
    """The sums that a query sees: with a bonus it reads the state before its own token."""
    if call.bonus is None:
        return sums
    around = ((0, 0), (0, 1) if call.reverse else (1, 0), (0, 0), (0, 0))
    return jnp.pad(sums[:, 1:] if call.reverse else sums[:, :-1], around)


def _read(query: Any, state: Any) -> Any:
    """`[b, t, H, d]` times the state `[b, H, d, v]`, wide; rounded to bfloat16 where queries are."""
    if query.dtype == jnp.bfloat16:
        return jnp.einsum("bthd,bhdv->bthv", query, state.astype(query.dtype)).astype(state.dtype)
    return _product("bthd,bhdv->bthv", query.astype(state.dtype), state)


def _product(subscripts: str, one: Any, other: Any) -> Any:
    return jnp.einsum(subscripts, one, other, precision=jax.lax.Precision.HIGHEST)
