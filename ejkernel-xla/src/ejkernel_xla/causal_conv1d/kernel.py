"""A sum of shifted copies, one per tap, which XLA fuses into one pass; the gradient is its transpose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall, CausalConv1dInputs, CausalConv1dOutputs
from ejkernel.operations.causal_conv1d.runs import Runs, last_inputs, runs_of
from ejkernel.utils.dtypes import accumulator, common_dtype


def forward(call: CausalConv1dCall, inputs: CausalConv1dInputs, config: None) -> CausalConv1dOutputs:
    return _convolve(call, inputs, runs_of(call, inputs))


def backward(
    call: CausalConv1dCall,
    inputs: CausalConv1dInputs,
    outputs: CausalConv1dOutputs,
    cotangents: CausalConv1dOutputs,
    config: None,
) -> CausalConv1dInputs:
    runs = runs_of(call, inputs)
    arrays = {"x": inputs.x, "weight": inputs.weight, "bias": inputs.bias, "initial_state": inputs.initial_state}

    def run(arrays: dict[str, Any]) -> CausalConv1dOutputs:
        return _convolve(call, inputs._replace(**arrays), runs)

    (grads,) = jax.vjp(run, arrays)[1](cotangents)
    return CausalConv1dInputs(**grads, seg_ids=None, cu_seqlens=None)


def _convolve(call: CausalConv1dCall, inputs: CausalConv1dInputs, runs: Runs | None) -> CausalConv1dOutputs:
    x, state, wide = inputs.x, inputs.initial_state, accumulator(inputs.x.dtype)
    batch, length, channels = x.shape
    weight, before = inputs.weight.astype(wide), call.width - 1
    if state is None or runs is not None:
        padded = jnp.pad(x, ((0, 0), (before, 0), (0, 0)))
    else:
        common = common_dtype(x.dtype, state.dtype)
        padded = jnp.concatenate([state[:, 0].astype(common), x.astype(common)], axis=1)
    out = jnp.zeros((batch, length, channels), wide)
    for back in range(call.width):
        shifted = jax.lax.slice_in_dim(padded, before - back, before - back + length, axis=1).astype(wide)
        if runs is not None:
            shifted = jnp.where((runs.seen >= back)[..., None], shifted, jnp.zeros((), wide))
        out = out + shifted * weight[:, None, :, before - back]
    if state is not None and runs is not None and length:
        out = _add_state(call, out, weight, state.astype(wide), runs.first)
    if inputs.bias is not None:
        out = out + inputs.bias.astype(wide)[:, None]
    if call.activation == "silu":
        out = jax.nn.silu(out)
    if runs is not None:
        out = jnp.where((runs.seen >= 0)[..., None], out, jnp.zeros((), wide))
    return CausalConv1dOutputs(out.astype(x.dtype), last_inputs(call, x, state, runs) if call.return_state else None)


def _add_state(call: CausalConv1dCall, out: Any, weight: Any, state: Any, run: tuple[Any, Any]) -> Any:
    """The results with what the first w - 1 tokens of each run see of the state before it."""
    before = call.width - 1
    start, stop = (jnp.broadcast_to(edge, state.shape[:2]) for edge in run)
    add = jax.vmap(lambda rows, at, part: rows.at[at].add(part, mode="drop"))
    for token in range(before):
        taps = jnp.swapaxes(weight[:, None, :, : before - token], 2, 3)
        at = jnp.where(start + token < stop, start + token, out.shape[1])
        out = add(out, at, jnp.sum(taps * state[:, :, token:], axis=2))
    return out
