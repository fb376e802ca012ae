"""The model's operations by ejkernel, which picks the best installed kernel. `plain.py` has the same functions in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel_train import plain
from ejkernel_train.plain import EPSILON
from ejkernel_train.sharding import BATCH, Layout

feed_forward = plain.feed_forward  # in operations: products are XLA's


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    return ejkernel.rms_norm(x, scale, epsilon=epsilon)


def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> tuple[jax.Array, jax.Array]:
    return ejkernel.fused_add_rms_norm(x, residual, scale, epsilon=epsilon)


def rope(query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ejkernel.llama_rope(query, key, cos, sin, rotary_dim=2 * cos.shape[-1])


def qk_norm_rope(
    query: jax.Array,
    key: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    epsilon: float = EPSILON,
) -> tuple[jax.Array, jax.Array]:
    return ejkernel.fused_qk_norm_rope(
        query, key, cos, sin, query_scale, key_scale, epsilon=epsilon, rotary_dim=2 * cos.shape[-1]
    )


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    info = None if documents is None else ejkernel.MaskInfo.from_segments(documents)
    near = (window - 1, 0) if window else None
    return ejkernel.flash_attention(query, key, value, causal=True, mask_info=info, softmax_aux=sinks, sliding_window=near)


def cross_entropy(hidden: jax.Array, embedding: jax.Array, labels: jax.Array, layout: Layout) -> jax.Array:
    # from logits: on a GPU faster than with the head (`hidden=`), which saves their memory instead
    logits = layout.logits(jnp.einsum("btd,vd->btv", hidden, embedding))
    if layout.mesh is None:
        return ejkernel.fused_cross_entropy(logits, labels).loss
    specs = P(BATCH, None, "tensor"), P(BATCH), None, None, None, None
    return ejkernel.fused_cross_entropy(logits, labels, mesh=layout.mesh, in_specs=specs, out_specs=P()).loss


def causal_conv1d(x: jax.Array, weight: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    return ejkernel.causal_conv1d(x, weight, activation="silu", seg_ids=documents)


def gated_rms_norm(x: jax.Array, gate: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    return ejkernel.gated_rms_norm(x, gate, scale, norm_before_gate=True, epsilon=epsilon)


def gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array, documents: jax.Array | None = None
) -> jax.Array:
    return ejkernel.gated_delta_rule(query, key, value, beta, decay=decay, seg_ids=documents)


def gated_state_space(
    x: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    dt: jax.Array,
    dt_bias: jax.Array,
    gate: jax.Array,
    scale: jax.Array,
    documents: jax.Array | None = None,
) -> jax.Array:
    out, _, _ = ejkernel.state_space_v2(x, A, B, C, D, dt, dt_bias=dt_bias, dt_softplus=True, seg_ids=documents)
    return ejkernel.gated_rms_norm(out.reshape(gate.shape), gate, scale, norm_before_gate=False, epsilon=EPSILON)


def swiglu(gate: jax.Array, up: jax.Array, limit: float = 0.0, alpha: float = 1.0) -> jax.Array:
    clamped: dict[str, Any] = {"limit": limit, "alpha": alpha, "up_offset": 1.0} if limit else {}
    return ejkernel.gated_linear_unit(gate, up, **clamped)


def moe_route(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    return ejkernel.moe_route(logits, chosen)


def moe_permute(x: jax.Array, experts: jax.Array, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return ejkernel.moe_permute(x, experts, number)


def moe_unpermute(rows: jax.Array, positions: jax.Array, weights: jax.Array) -> jax.Array:
    return ejkernel.moe_unpermute(rows, positions, weights)


def grouped_matmul(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    return ejkernel.grouped_matmul(rows, matrices, sizes, bias=bias)


def scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, *, dtype: Any, transpose_rhs: bool = False
) -> jax.Array:
    return ejkernel.scaled_matmul(
        lhs, rhs, lhs_scale, rhs_scale, transpose_rhs=transpose_rhs, precision="default", out_dtype=dtype
    )


def quantize_float8(values: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    found = ejkernel.quantize_float8(values, scale, dtype=dtype, transposed=True)
    return found.values, found.transposed, found.largest
