"""The delta rule: a loop over steps of a few chunks; backward runs it in reverse and recomputes each step.

Between steps only the state is kept. The chunked form is that of Yang et al., Parallelizing Linear Transformers with the Delta
Rule over Sequence Length, 2024, and of Gated Delta Networks, 2025, with decays inside of the products.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.delta_rule.interface import DeltaRuleCall, DeltaRuleInputs, DeltaRuleOutputs
from ejkernel_xla.delta_rule.config import DeltaRuleConfig
from ejkernel_xla.delta_rule.layout import Grid, Packed, Rows
from ejkernel_xla.delta_rule.products import scan
from ejkernel_xla.delta_rule.steps import Step, Tokens, run_step


def _nothing_to_do(call: DeltaRuleCall) -> bool:
    return call.query.size * call.value.size * call.sequences == 0


def _as_run(call: DeltaRuleCall, config: DeltaRuleConfig) -> DeltaRuleCall:
    """Token by token if the config says so; one token is one step of the recurrence anyhow."""
    return dataclasses.replace(call, use_chunked=False) if config.token_by_token or call.query.shape[1] == 1 else call


def _initial(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> Any:
    """`[b, n, H, d, v]`."""
    if inputs.initial_state is not None:
        return inputs.initial_state
    batch, _, _, width = call.query.shape
    shape = (batch, call.sequences, call.heads, width, call.value.shape[3])
    return vary_like(jnp.zeros(shape, call.state_dtype), inputs.query)


def _tokens(inputs: DeltaRuleInputs, cut: Any) -> Tokens:
    return Tokens(*(None if array is None else cut(array) for array in (getattr(inputs, name) for name in Tokens._fields)))


def _maybe(needed: Any, run: Any, carry: Any, values: Any) -> Any:
    """`run(carry, values)`; where nothing needs it, the carry as it is and zeros."""
    if needed is None:
        return run(carry, values)
    shapes = jax.eval_shape(run, carry, values)
    zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), shapes)

    def skip(carry: Any, values: Any) -> Any:
        return vary_like((carry, *zeros[1:]), (carry, values))

    return jax.lax.cond(needed, lambda *given: vary_like(run(*given), given), skip, carry, values)


def _needed(layout: Packed, grid: Grid) -> Any:
    """Which steps have chunks in use."""
    return jnp.arange(grid.steps, dtype=jnp.int32) * grid.chunks < layout.used


def forward(call: DeltaRuleCall, inputs: DeltaRuleInputs, config: DeltaRuleConfig) -> DeltaRuleOutputs:
    initial = _initial(call, inputs)
    if _nothing_to_do(call):
        out = jnp.zeros((*call.query.shape[:2], call.heads, call.value.shape[3]), call.value.dtype)
        return DeltaRuleOutputs(vary_like(out, inputs.query), initial if call.return_state else None)
    run = _as_run(call, config)
    grid = Grid.of(run, config)
    return (_forward_rows if call.cu_seqlens is None else _forward_packed)(run, inputs, grid, initial)


def _forward_rows(call: DeltaRuleCall, inputs: DeltaRuleInputs, grid: Grid, initial: Any) -> DeltaRuleOutputs:
    layout = Rows(call, inputs, grid)

    def step(state: Any, values: Step) -> Any:
        state, out, _ = run_step(call, state, values)
        return state, out

    state, out = scan(step, initial[:, 0], Step(_tokens(inputs, layout.cut), layout.marks))
    out = layout.joined(out.astype(call.value.dtype))
    return DeltaRuleOutputs(out, state[:, None] if call.return_state else None)


def _forward_packed(call: DeltaRuleCall, inputs: DeltaRuleInputs, grid: Grid, initial: Any) -> DeltaRuleOutputs:
    layout = Packed(call, inputs, grid)

    def step(state: Any, values: Any) -> Any:
        needed, values = values
        state, *found = _maybe(needed, lambda state, values: run_step(call, state, values), state, values)
        return state, found

    steps = (_needed(layout, grid), Step(_tokens(inputs, layout.cut), layout.marks, layout.starts(initial)))
    _, (out, states) = scan(step, jnp.zeros_like(initial[:, 0]), steps)
    after, alone, _ = _run_singles(call, layout, _tokens(inputs, layout.single), initial)
    out = layout.joined(out) + layout.to_tokens(alone)
    if not call.return_state:
        return DeltaRuleOutputs(out.astype(call.value.dtype))
    final = jnp.where(_of(layout.at.is_single), layout.singles(after), initial)
    final = jnp.where(_of(layout.at.has_chunks), layout.ends(states), final)
    return DeltaRuleOutputs(out.astype(call.value.dtype), final)


def _of(mask: Any) -> Any:
    return mask[..., None, None, None]


def _run_singles(call: DeltaRuleCall, layout: Packed, tokens: Tokens, initial: Any) -> tuple[Any, Any, Any]:
    """Every sequence of one token, as if all were a batch of single steps."""
    return run_step(dataclasses.replace(call, use_chunked=False), initial.reshape(-1, *initial.shape[2:]), Step(tokens))


def backward(
    call: DeltaRuleCall,
    inputs: DeltaRuleInputs,
    outputs: DeltaRuleOutputs,
    cotangents: DeltaRuleOutputs,
    config: DeltaRuleConfig,
) -> DeltaRuleInputs:
    initial = _initial(call, inputs)
    d_final = jnp.zeros_like(initial) if cotangents.final_state is None else cotangents.final_state
    if _nothing_to_do(call):
        tokens, d_initial = _tokens(inputs, jnp.zeros_like), d_final
    else:
        run = _as_run(call, config)
        gradients = _backward_rows if call.cu_seqlens is None else _backward_packed
        d_out = cotangents.out.astype(call.state_dtype)
        tokens, d_initial = gradients(run, inputs, Grid.of(run, config), initial, d_out, d_final)
    return DeltaRuleInputs(**tokens._asdict(), initial_state=None if inputs.initial_state is None else d_initial)


def _states_before(step: Any, state: Any, steps: Any) -> Any:
    """The state before every step."""
    if jax.tree.leaves(steps)[0].shape[0] == 1:
        return state[None]
    return scan(lambda state, values: (step(state, values), state), state, steps)[1]


def _backward_rows(
    call: DeltaRuleCall, inputs: DeltaRuleInputs, grid: Grid, initial: Any, d_out: Any, d_final: Any
) -> tuple[Tokens, Any]:
    layout = Rows(call, inputs, grid)
    steps = Step(_tokens(inputs, layout.cut), layout.marks)
    states = _states_before(lambda state, values: run_step(call, state, values)[0], initial[:, 0], steps)

    def step(d_state: Any, values: Any) -> Any:
        state, (tokens, marks, _), d_out = values
        _, pull = jax.vjp(lambda state, tokens: run_step(call, state, Step(tokens, marks))[:2], state, tokens)
        return pull((d_state, d_out))

    d_state, d_tokens = scan(step, d_final[:, 0], (states, steps, layout.cut(d_out)), reverse=True)
    return jax.tree.map(layout.joined, d_tokens), d_state[:, None]


def _backward_packed(
    call: DeltaRuleCall, inputs: DeltaRuleInputs, grid: Grid, initial: Any, d_out: Any, d_final: Any
) -> tuple[Tokens, Any]:
    layout = Packed(call, inputs, grid)
    needed = _needed(layout, grid)
    steps = Step(_tokens(inputs, layout.cut), layout.marks, layout.starts(initial))

    def forth(state: Any, values: Any) -> Any:
        needed, values = values
        return _maybe(needed, lambda state, values: run_step(call, state, values)[:1], state, values)[0]

    def pull(d_state: Any, values: Any) -> Any:
        state, (tokens, marks, starts), *d_found = values

        def again(state: Any, tokens: Tokens, starts: Any) -> Any:
            return run_step(call, state, Step(tokens, marks, starts))

        return jax.vjp(again, state, tokens, starts)[1]((d_state, *d_found))

    def back(d_state: Any, values: Any) -> Any:
        needed, *values = values
        d_state, *d_values = _maybe(needed, pull, d_state, values)
        return d_state, d_values

    zero = jnp.zeros_like(initial[:, 0])
    states = _states_before(forth, zero, (needed, steps))
    values = (needed, states, steps, layout.cut(d_out), layout.ends_gradient(d_final))
    _, (d_tokens, d_starts) = scan(back, zero, values, reverse=True)

    tokens = _tokens(inputs, layout.single)
    _, pull_singles = jax.vjp(lambda tokens, initial: _run_singles(call, layout, tokens, initial)[:2], tokens, initial)
    d_after = jnp.where(_of(layout.at.is_single), d_final, 0).reshape(-1, *d_final.shape[2:])
    d_tokens_alone, d_initial = pull_singles((d_after, layout.single(d_out)))
    d_initial = d_initial + layout.starts_gradient(d_starts)
    untouched = ~(layout.at.is_single | layout.at.has_chunks)
    d_initial = d_initial + jnp.where(_of(untouched), d_final, 0)
    d_tokens = jax.tree.map(lambda chunked, alone: layout.joined(chunked) + layout.to_tokens(alone), d_tokens, d_tokens_alone)
    return d_tokens, d_initial
