"""A stable sort of the experts says where copies go; the gradient gathers them back."""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.operations.moe_permute.interface import MoePermuteCall, MoePermuteInputs, MoePermuteOutputs
from ejkernel_xla._copies import collect, sources, spread


def forward(call: MoePermuteCall, inputs: MoePermuteInputs, config: None) -> MoePermuteOutputs:
    x, experts = inputs
    flat = experts.reshape(experts.shape[0], -1)
    held = (flat >= 0) & (flat < call.num_experts)
    source = jnp.argsort(jnp.where(held, flat, call.num_experts), axis=1, stable=True).astype(jnp.int32)
    row = sources(source[:, :, None])  # the inverse permutation
    positions = jnp.where(held, row, ~row).reshape(experts.shape)
    groups = jnp.arange(call.num_experts, dtype=jnp.int32)
    sizes = jnp.sum(flat[:, :, None] == groups[None, None], axis=1, dtype=jnp.int32)
    return MoePermuteOutputs(spread(x, positions, source), sizes, positions)


def backward(
    call: MoePermuteCall, inputs: MoePermuteInputs, outputs: MoePermuteOutputs, cotangents: MoePermuteOutputs, config: None
) -> MoePermuteInputs:
    return MoePermuteInputs(collect(cotangents.rows, outputs.positions), None)  # pyright: ignore[reportArgumentType]
