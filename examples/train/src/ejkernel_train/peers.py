"""The model's operations by the best that others publish for JAX on Hopper GPUs, and in plain JAX where that is the best.

jax-linear-attention (`jla`, version 0.1.0) has the delta rule, Mamba-2's state space with its gated norm, the short convolution,
grouped products, feed-forward layers of float8 whose activation is cast as it is computed, and the loss from hidden states, whose
gradient is formed in the forward. Dense attention is cuDNN's by `jax.nn`,
which is also what jla chooses. Where its kernels do not run, as on a CPU, it has the same in plain JAX, and so has this module for
recurrences over packed documents.

Left out: flash attention 4 for JAX (`fa4-jax`), whose compiler is a package of its own of 92 MB; tokamax, whose attention and
grouped products were slower than these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel_train import float8, plain, plain_experts
from ejkernel_train.data import IGNORED
from ejkernel_train.sharding import BATCH, Layout

try:
    from jla.layers import mamba2_fused
    from jla.layers.fp8 import Fp8State
    from jla.layers.fp8_swiglu import fp8_swiglu_mlp
    from jla.ops import linear_attention
    from jla.ops.cross_entropy import linear_cross_entropy_objective
    from jla.ops.mosaic_gpu import gated_delta_rule as delta_kernels, ragged_dot, short_conv
    from jla.ops.mosaic_gpu._common import is_hopper
except ImportError as error:
    raise ValueError(f"the build 'peers' needs jax-linear-attention: pip install 'ejkernel-train[peers]' ({error})") from error

attention, rms_norm, add_rms_norm = plain.attention, plain.rms_norm, plain.add_rms_norm
rope, qk_norm_rope, gated_rms_norm = plain.rope, plain.qk_norm_rope, plain.gated_rms_norm
swiglu, scaled_matmul, quantize_float8 = plain.swiglu, plain.scaled_matmul, plain.quantize_float8
moe_route, moe_permute, moe_unpermute = plain.moe_route, plain.moe_permute, plain.moe_unpermute


def cross_entropy(hidden: jax.Array, embedding: jax.Array, labels: jax.Array, layout: Layout) -> jax.Array:
    if layout.mesh is not None and layout.mesh.shape["tensor"] > 1:
        return plain.cross_entropy(hidden, embedding, labels, layout)  # theirs does not split the vocabulary

    def mean(hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> jax.Array:
        rows = hidden.reshape(-1, hidden.shape[-1])
        flat, dtype = labels.reshape(-1), hidden.dtype
        found = linear_cross_entropy_objective(rows, embedding, flat, ignore_index=IGNORED, compute_dtype=dtype)
        total, number = layout.mean_over_batch((found.objective_sum, jnp.sum(flat != IGNORED, dtype=jnp.float32)))
        return total / jnp.maximum(number, 1 / flat.size)

    return layout.on_each_device(mean, (P(BATCH), P(), P(BATCH)), P())(hidden, embedding, labels)


def causal_conv1d(x: jax.Array, weight: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    if documents is None and short_conv.unsupported_reason(x, weight) is None:
        return short_conv.short_conv(x, weight)
    return plain.causal_conv1d(x, weight, documents)


@plain.lean
def _unit(x: jax.Array) -> jax.Array:
    """Channels of length 1, in the dtype of x."""
    wide = x.astype(plain.FLOAT32)
    inverse = plain.kept(jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + plain.EPSILON))
    return (wide * inverse).astype(x.dtype)


def gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array, documents: jax.Array | None = None
) -> jax.Array:
    if documents is not None:
        return plain.gated_delta_rule(query, key, value, beta, decay, documents)
    query, key = _unit(query), _unit(key)
    if not delta_kernels.supports_gated_delta_rule(query, key, value, decay, beta):  # the kernels share a key head
        query, key = (jnp.repeat(x, value.shape[2] // x.shape[2], axis=2) for x in (query, key))
    out, _ = linear_attention("gated_deltanet", query, key, value, g=decay, beta=beta)
    return out


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
    if documents is not None or not is_hopper():
        return plain.gated_state_space(x, A, B, C, D, dt, dt_bias, gate, scale, documents)
    dt = jax.nn.softplus(dt.astype(plain.FLOAT32) + dt_bias)
    options = {"segment_ids": None, "impl": "auto", "chunk_size": 64, "grouped_key_grads": True}
    y = mamba2_fused.ssd_core(_stepped(x, dt), dt * A, B, C, **options)
    return mamba2_fused.gated_norm(y, x, gate, D, scale, eps=plain.EPSILON, compute_dtype=x.dtype)


@plain.lean
def _stepped(x: jax.Array, dt: jax.Array) -> jax.Array:
    return (x.astype(plain.FLOAT32) * dt[..., None]).astype(x.dtype)


def grouped_matmul(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    return plain_experts.with_bias(ragged_dot.grouped_matmul(rows, matrices, sizes, impl="auto"), sizes, bias)


def feed_forward(x: jax.Array, gate: Any, up: Any, down: Any, context: Any) -> jax.Array:
    if gate.scales is None or context.layout.mesh is not None:  # its kernels are of one device
        return plain.feed_forward(x, gate, up, down, context)
    weight = jnp.stack([gate.weight, up.weight], axis=1).astype(x.dtype)
    return _float8_layer(x, weight, down.weight.astype(x.dtype), gate.scales, up.scales, down.scales)


@jax.custom_vjp
def _float8_layer(
    x: jax.Array, weight: jax.Array, down: jax.Array, gate_scales: jax.Array, up_scales: jax.Array, down_scales: jax.Array
) -> jax.Array:
    """One product for gate and up, which share the larger of their scales."""
    return fp8_swiglu_mlp(x, weight, down, _state(jnp.maximum(gate_scales, up_scales)), _state(down_scales))


def _state(scales: jax.Array) -> Fp8State:
    """Its histories of largest values, of one step each, whose scales are these."""
    parts: list[jax.Array] = []
    for scale, most in zip(scales, float8.MOST, strict=True):
        parts += [scale, (scale * most)[None]]
    return Fp8State(*parts)


def _largest(state: Fp8State) -> jax.Array:
    return jnp.concatenate([state.input_amax_history, state.kernel_amax_history, state.grad_amax_history])


def _forward(x: jax.Array, weight: jax.Array, down: jax.Array, *scales: jax.Array) -> tuple[jax.Array, Any]:
    gate_scales, up_scales, down_scales = scales
    states = _state(jnp.maximum(gate_scales, up_scales)), _state(down_scales)
    return jax.vjp(fp8_swiglu_mlp, x, weight, down, *states)


def _backward(pull: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    """Its states' gradients are the next states, which hold what was largest in this step."""
    d_x, d_weight, d_down, shared, last = pull(cotangent)
    return d_x, d_weight, d_down, _largest(shared), _largest(shared), _largest(last)


_float8_layer.defvjp(_forward, _backward)
