"""The model's operations in plain JAX, written as XLA runs them best. `fast.py` has the same functions by ejkernel.

Products have the dtype of their operands; norms, softmax and states are float32 inside. B batch, T tokens, d channels; H and K
query and key heads of D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

EPSILON = 1e-6
FLOAT32 = jnp.float32


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x [..., d], scale [d] -> [..., d]`."""
    wide = x.astype(FLOAT32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON)
    return (normed * scale).astype(x.dtype)


def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The norm of `x + residual`, and that sum."""
    total = x + residual
    return rms_norm(total, scale), total


def rope(query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries `[B, T, H, D]` and keys `[B, T, K, D]`, turned by the angles `[T, D / 2]` of their positions."""

    def turn(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(FLOAT32), 2, axis=-1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1).astype(x.dtype)

    return turn(query), turn(key)


def qk_norm_rope(
    query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array, query_scale: jax.Array, key_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Norm of every head over its channels, with scales `[D]`, then `rope`."""
    return rope(rms_norm(query, query_scale), rms_norm(key, key_scale), cos, sin)


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal: `[B, T, H, D], [B, T, K, D], [B, T, K, D] -> [B, T, H, D]`."""
    cudnn = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn" if cudnn else "xla")


def cross_entropy(logits: jax.Array, labels: jax.Array, mesh: Mesh | None) -> jax.Array:
    """The mean over tokens of `logits [B, T, V]`, `labels [B, T]`; what is on a mesh lies there as `sharding.py` says."""

    @jax.checkpoint  # the backward reads the logits again instead of float32 weights, twice their size
    def mean(logits: jax.Array) -> jax.Array:
        wide = logits.astype(FLOAT32)
        chosen = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 2) == labels[..., None]  # fuses, unlike a gather's gradient
        return jnp.mean(jax.nn.logsumexp(wide, axis=-1) - jnp.sum(jnp.where(chosen, wide, 0), axis=-1))

    return mean(logits)


def causal_conv1d(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`silu` of every channel's filter over the last W tokens: `x [B, T, C], weight [C, W] -> [B, T, C]`."""
    length, width = x.shape[1], weight.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    shifted = [padded[:, tap : tap + length].astype(FLOAT32) * weight[:, tap].astype(FLOAT32) for tap in range(width)]
    return jax.nn.silu(sum(shifted[1:], shifted[0])).astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, scale: jax.Array, *, norm_before_gate: bool) -> jax.Array:
    """`norm(x) * scale * silu(gate)`, or gated first: `norm(x * silu(gate)) * scale`."""
    wide, opened = x.astype(FLOAT32), jax.nn.silu(gate.astype(FLOAT32))
    return (rms_norm(wide, scale) * opened if norm_before_gate else rms_norm(wide * opened, scale)).astype(x.dtype)


def gated_delta_rule(query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array) -> jax.Array:
    """`S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = S^T q / sqrt(D)`, with queries and keys of length 1.

    Chunk by chunk in matrix products: within a chunk the corrections solve a triangular system (Yang et al., Gated Delta
    Networks, 2025). `query, key [B, T, K, D]`, `value [B, T, H, D]`, `beta, decay [B, T, H]`, decay the logarithm g.
    """
    dtype, heads, size = value.dtype, value.shape[2], math.gcd(value.shape[1], 64)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, H | K, ...] -> [N, B, H, C, ...]
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 3), (0, 2))

    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    query, key, value, beta, decay = map(chunks, (query, key, value, beta.astype(FLOAT32), decay.astype(FLOAT32)))
    passed, ratio = _decays(decay)
    product = _products(dtype)
    system = beta[..., None] * ratio * product("nbhid,nbhjd->nbhij", key, key)
    inverse = _inverse(jnp.tril(system, -1))
    added = product("nbhij,nbhjd->nbhid", inverse, beta[..., None] * value)
    erased = product("nbhij,nbhjd->nbhid", inverse, (beta * jnp.exp(passed))[..., None] * key)
    scores = ratio * product("nbhid,nbhjd->nbhij", query, key)
    read = jnp.exp(passed)[..., None] * query
    kept = jnp.exp(passed[..., -1:] - passed)[..., None] * key
    last = jnp.exp(passed[..., -1])
    # narrow outside of the loop, where it is fused with what comes before
    narrow = (x.astype(dtype) for x in (added, erased, scores, read, kept))

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        added, erased, scores, read, kept, last = chunk
        new = added - product("bhid,bhdv->bhiv", erased, state)
        out = product("bhid,bhdv->bhiv", read, state) + product("bhij,bhjv->bhiv", scores, new)
        return last[..., None, None] * state + product("bhid,bhiv->bhdv", kept, new), out.astype(dtype)

    start = jnp.zeros_like(product("bhid,bhiv->bhdv", key[0], value[0]))
    _, out = jax.lax.scan(step, start, (*narrow, last))  # [N, B, H, C, D]
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(out.shape[0], -1, *out.shape[3:])


def state_space(
    x: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, D: jax.Array, dt: jax.Array, dt_bias: jax.Array
) -> jax.Array:
    """Mamba-2: `h <- exp(A dt) h + dt x B^T; y = h C + D x`, dt through its bias and softplus.

    Chunk by chunk in matrix products (Dao and Gu, Transformers are SSMs, 2024, section 6). `x [B, T, H, P]`,
    `A, D, dt_bias [H]`, `B, C [B, T, G, N]` for H / G heads each, `dt [B, T, H]`.
    """
    dtype, groups, size = x.dtype, B.shape[2], math.gcd(x.shape[1], 128)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [N, B, C, ...]
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def grouped(x: jax.Array) -> jax.Array:  # [N, B, C, H, ...] -> [N, B, C, G, H / G, ...]
        return x.reshape(*x.shape[:3], groups, -1, *x.shape[4:])

    dt = jax.nn.softplus(dt.astype(FLOAT32) + dt_bias)
    stepped, inputs, outputs = grouped(chunks(x * dt[..., None])), chunks(B), chunks(C)
    passed, ratio = _decays(jnp.moveaxis(grouped(chunks(A * dt)), 2, -1))  # [N, B, G, R, C], with another C
    product = _products(dtype)
    scores = ratio * product("nbigs,nbjgs->nbgij", outputs, inputs)[:, :, :, None]
    inside = product("nbgrij,nbjgrp->nbigrp", scores, stepped)
    kept = jnp.moveaxis(jnp.exp(passed[..., -1:] - passed), -1, 2)[..., None] * stepped
    added = product("nbjgs,nbjgrp->nbgrps", inputs, kept)

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        added, last = chunk
        return last[..., None, None] * state + added, state.astype(dtype)

    _, before = jax.lax.scan(step, jnp.zeros_like(added[0]), (added, jnp.exp(passed[..., -1])))
    outside = product("nbigs,nbgrps->nbigrp", outputs, before) * jnp.moveaxis(jnp.exp(passed), -1, 2)[..., None]
    return (jnp.moveaxis(inside + outside, 0, 1).reshape(x.shape) + D[:, None] * x).astype(dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`, rounded once."""
    return (jax.nn.silu(gate.astype(FLOAT32)) * up).astype(gate.dtype)


def moe_route(logits: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """Weights, which sum to 1, and numbers of each token's likeliest experts: `[N, E] -> [N, k], [N, k]`."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(FLOAT32), axis=-1), chosen)
    return weights / jnp.sum(weights, axis=-1, keepdims=True), experts


def moe_permute(x: jax.Array, experts: jax.Array, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """k copies of each token `[N, d]` in the order of their experts `[N, k]`, copies for each expert, and places of copies.

    Those of experts that are none of the `number`, which other devices have, come last.
    """
    experts = jnp.where((experts >= 0) & (experts < number), experts, number)
    order = jnp.argsort(experts.reshape(-1))
    rows = jnp.repeat(x, experts.shape[1], axis=0).at[order].get(unique_indices=True)
    return rows, jnp.bincount(experts.reshape(-1), length=number), jnp.argsort(order).reshape(experts.shape)


def moe_unpermute(rows: jax.Array, positions: jax.Array, weights: jax.Array) -> jax.Array:
    """Each token's weighted sum of its copies: `[N k, d], [N, k], [N, k] -> [N, d]`."""
    copies = rows.at[positions.reshape(-1)].get(unique_indices=True).reshape(*positions.shape, -1)
    return jnp.einsum("nkd,nk->nd", copies, weights.astype(rows.dtype))


def grouped_matmul(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Consecutive groups of rows times a matrix each: `[M, K], [G, K, N], [G] -> [M, N]`."""
    return jax.lax.ragged_dot(rows, matrices, sizes)


def scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, *, dtype: Any, transpose_rhs: bool = False
) -> jax.Array:
    """`lhs [M, K] @ rhs [K, N]`, both of float8, times one scale each; rhs is `[N, K]` with transpose_rhs."""
    product = jnp.einsum("mk,nk->mn" if transpose_rhs else "mk,kn->mn", lhs, rhs, preferred_element_type=FLOAT32)
    return (product * (lhs_scale * rhs_scale)).astype(dtype)


def _products(dtype: Any) -> Callable[..., jax.Array]:
    """`einsum` of operands in `dtype`, with sums and result in float32."""

    def product(spec: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *(operand.astype(dtype) for operand in operands), preferred_element_type=FLOAT32)

    return product


def _unit(x: jax.Array) -> jax.Array:
    wide = x.astype(FLOAT32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPSILON)


def _decays(decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of logarithms `[..., C]`: their sums up to each token, and what is left at token i of token j, `[..., C, C]`."""
    passed = jnp.cumsum(decay, axis=-1)
    seen = jnp.tril(jnp.ones((decay.shape[-1],) * 2, bool))
    return passed, jnp.exp(jnp.where(seen, passed[..., :, None] - passed[..., None, :], -jnp.inf))


def _inverse(lower: jax.Array) -> jax.Array:
    """Of 1 + a strictly lower triangular matrix `[..., C, C]`, C a power of two, from diagonal blocks of 1, 2, 4, ..."""
    number = jnp.arange(lower.shape[-1])
    inverse = jnp.eye(lower.shape[-1])
    for size in (2**power for power in range(lower.shape[-1].bit_length() - 1)):
        apart = (number[:, None] // size != number // size) & (number[:, None] // (2 * size) == number // (2 * size))
        inverse = inverse - inverse @ jnp.where(apart, jax.lax.stop_gradient(lower), 0) @ inverse
    # one step of Newton's iteration leaves the value as it is and has the gradient of the inverse
    return 2 * inverse - inverse @ (inverse + lower @ inverse)
