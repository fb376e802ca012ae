"""The model's operations with jax alone, written as XLA runs them best. `fast.py` has the same functions by ejkernel.

Products have the dtype of their operands; norms, softmax and states are float32 inside. For the backward an operation keeps its
arguments and single numbers of rows, and computes the rest again where it reads them: XLA fuses that, and float32 intermediates
would be written and read. B batch, T tokens, d channels; H and K query and key heads of D channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejkernel_train import plain_experts
from ejkernel_train.sharding import Layout

EPSILON = 1e-6
FLOAT32 = jnp.float32


def kept(x: jax.Array) -> jax.Array:
    """What the backward of a function under `lean` reads beside its arguments."""
    return checkpoint_name(x, "kept")


def lean(function: Callable[..., Any], prevent_cse: bool = False) -> Callable[..., Any]:
    """The function, whose backward computes again what is not `kept`.

    Forward and backward of a block are two loops, so XLA finds no common subexpressions to keep; outside of the loop over blocks
    `prevent_cse` says that it must not.
    """
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)


@lean
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """`x [..., d], scale [d] -> [..., d]`."""
    wide = x.astype(FLOAT32)
    inverse = kept(jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon))
    return (wide * inverse * scale).astype(x.dtype)


def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> tuple[jax.Array, jax.Array]:
    """The norm of `x + residual`, and that sum."""
    total = x + residual
    return rms_norm(total, scale, epsilon), total


def rope(query: jax.Array, key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries `[B, T, H, D]` and keys `[B, T, K, D]`, turned by the angles `[T, D / 2]` or
    `[B, T, D / 2]` of their positions; with fewer angles, the first channels of each head."""

    def turn(x: jax.Array) -> jax.Array:
        wide, pairs = x.astype(FLOAT32), cos.shape[-1]
        first, second, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
        c, s = cos[..., None, :], sin[..., None, :]
        return jnp.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1).astype(x.dtype)

    return turn(query), turn(key)


@lean
def qk_norm_rope(
    query: jax.Array,
    key: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    epsilon: float = EPSILON,
) -> tuple[jax.Array, jax.Array]:
    """Norm of every head over its channels, with scales `[D]`, then `rope`."""
    return rope(rms_norm(query, query_scale, epsilon), rms_norm(key, key_scale, epsilon), cos, sin)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None = None,
    *,
    sinks: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """Causal, within documents `[B, T]`: `[B, T, H, D], [B, T, K, D], [B, T, K, D] -> [B, T, H, D]`.

    With a window each token sees so many, itself included; sinks `[H]` are logits of nothing beside those of the keys.
    """
    cudnn = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16
    same = None if documents is None else (documents[:, :, None] == documents[:, None, :])[:, None]
    implementation = "cudnn" if cudnn else "xla"
    if sinks is not None:
        return _attention_with_sinks(query, key, value, same, sinks, window)
    near = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
        query, key, value, mask=same, is_causal=True, local_window_size=near, implementation=implementation
    )


def _attention_with_sinks(
    query: jax.Array, key: jax.Array, value: jax.Array, same: jax.Array | None, sinks: jax.Array, window: int
) -> jax.Array:
    """`same`: of one document, `[B, 1, T, T]`."""
    length, shared = query.shape[1], key.shape[2]
    seen = jnp.tril(jnp.ones((length, length), bool))
    if window:
        seen = seen & ~jnp.tril(seen, -window)
    seen = seen if same is None else (seen & same)[:, :, None]
    product = _products(query.dtype)
    query = query.reshape(*query.shape[:2], shared, -1, query.shape[-1])
    scores = jnp.where(seen, product("btkrd,bskd->bkrts", query, key) * query.shape[-1] ** -0.5, -jnp.inf)
    own = sinks.astype(FLOAT32).reshape(shared, -1, 1, 1)
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), own))
    shares = jnp.exp(scores - largest)
    shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(own - largest))
    out = product("bkrts,bskd->btkrd", shares, value)
    return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(value.dtype)


def cross_entropy(hidden: jax.Array, embedding: jax.Array, labels: jax.Array, layout: Layout) -> jax.Array:
    """The mean over the labels `[B, T]` that are not below 0, of `hidden [B, T, d]` times the head, `embedding [V, d]`."""
    logits = layout.logits(jnp.einsum("btd,vd->btv", hidden, embedding))

    @functools.partial(lean, prevent_cse=True)
    def mean(logits: jax.Array) -> jax.Array:
        wide = logits.astype(FLOAT32)
        largest = kept(jax.lax.stop_gradient(jnp.max(wide, axis=-1)))
        total = kept(jnp.sum(jnp.exp(wide - largest[..., None]), axis=-1))
        chosen = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 2) == labels[..., None]  # fuses, unlike a gather's gradient
        each = largest + jnp.log(total) - jnp.sum(jnp.where(chosen, wide, 0), axis=-1)
        return jnp.sum(jnp.where(labels < 0, 0, each)) / jnp.maximum(jnp.sum(labels >= 0), 1)

    return mean(logits)


@lean
def causal_conv1d(x: jax.Array, weight: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    """`silu` of every channel's filter over the last W tokens of the document: `x [B, T, C], weight [C, W] -> [B, T, C]`."""
    length, width = x.shape[1], weight.shape[1]

    def earlier(x: jax.Array, tap: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (width - 1 - tap, 0), *[(0, 0)] * (x.ndim - 2)))[:, :length]

    shifted = [earlier(x, tap).astype(FLOAT32) * weight[:, tap].astype(FLOAT32) for tap in range(width)]
    if documents is not None:
        same = (earlier(documents, tap) == documents for tap in range(width))  # 0 before the row, which has zeros there
        shifted = [jnp.where(here[..., None], each, 0) for here, each in zip(same, shifted, strict=True)]
    return jax.nn.silu(sum(shifted[1:], shifted[0])).astype(x.dtype)


@lean
def gated_rms_norm(x: jax.Array, gate: jax.Array, scale: jax.Array, epsilon: float = EPSILON) -> jax.Array:
    """`norm(x) * scale * silu(gate)`."""
    wide = x.astype(FLOAT32)
    inverse = kept(jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon))
    return (wide * inverse * scale * jax.nn.silu(gate.astype(FLOAT32))).astype(x.dtype)


def gated_delta_rule(
    query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array, documents: jax.Array | None = None
) -> jax.Array:
    """`S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = S^T q / sqrt(D)`, with queries and keys of length 1.

    Chunk by chunk in matrix products: within a chunk the corrections solve a triangular system (Yang et al., Gated Delta
    Networks, 2025). `query, key [B, T, K, D]`, `value [B, T, H, D]`, `beta, decay [B, T, H]`, decay the logarithm g. The
    state is 0 before each of the documents `[B, T]`.
    """
    dtype, heads, size = value.dtype, value.shape[2], math.gcd(value.shape[1], 64)
    product = _products(dtype)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, H | K, ...] -> [N, B, H, C, ...]
        x = jnp.repeat(x, heads // x.shape[2], axis=2)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 3), (0, 2))

    @lean
    def within(
        query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array, documents: jax.Array | None
    ) -> Any:
        """All that needs no state."""
        query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
        query, key, value, beta, decay = map(chunks, (query, key, value, beta.astype(FLOAT32), decay.astype(FLOAT32)))
        if documents is not None:
            documents = jnp.moveaxis(documents.reshape(documents.shape[0], -1, 1, size), 1, 0)  # [N, B, 1, C]
        _, entered, ratio, left = _decays(decay, documents)
        system = beta[..., None] * ratio * kept(product("nbhid,nbhjd->nbhij", key, key))
        inverse = kept(_inverse(jnp.tril(system, -1)))
        added = product("nbhij,nbhjd->nbhid", inverse, beta[..., None] * value)
        erased = product("nbhij,nbhjd->nbhid", inverse, (beta * entered)[..., None] * key)
        scores = ratio * kept(product("nbhid,nbhjd->nbhij", query, key))
        read, left = entered[..., None] * query, left[..., None] * key
        # narrow outside of the loop, where it is fused with what comes before
        return tuple(x.astype(dtype) for x in (added, erased, scores, read, left)), entered[..., -1]

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        (added, erased, scores, read, left), last = chunk
        new = added - product("bhid,bhdv->bhiv", erased, state)
        out = product("bhid,bhdv->bhiv", read, state) + product("bhij,bhjv->bhiv", scores, new)
        return last[..., None, None] * state + product("bhid,bhiv->bhdv", left, new), out.astype(dtype)

    of_chunks = within(query, key, value, beta, decay, documents)
    (added, *_, left), _ = of_chunks
    start = jnp.zeros_like(product("bhid,bhiv->bhdv", left[0], added[0]))  # on the devices where these are
    _, out = jax.lax.scan(step, start, of_chunks)  # [N, B, H, C, D]
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(out.shape[0], -1, *out.shape[3:])


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
    """Mamba-2: `h <- exp(A dt) h + dt x B^T; y = h C + D x`, dt through its bias and softplus, then `norm(y silu(gate)) scale`.

    Chunk by chunk in matrix products (Dao and Gu, Transformers are SSMs, 2024, section 6); the states of chunks too are one
    product, with the decays between every two. `x [B, T, H, P]`, `A, D, dt_bias [H]`, `B, C [B, T, G, N]` for H / G heads each,
    `dt [B, T, H]`, `gate [B, T, H P]`, `scale [H P]`. The state is 0 before each of the documents `[B, T]`.
    """
    return _norm_of_gated(state_space(x, A, B, C, D, dt, dt_bias, documents).reshape(gate.shape), gate, scale)


@lean
def _norm_of_gated(x: jax.Array, gate: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(FLOAT32) * jax.nn.silu(gate.astype(FLOAT32))
    inverse = kept(jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPSILON))
    return (wide * inverse * scale).astype(x.dtype)


@lean
def state_space(
    x: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    dt: jax.Array,
    dt_bias: jax.Array,
    documents: jax.Array | None,
) -> jax.Array:
    """The recurrence of `gated_state_space`."""
    dtype, groups, size = x.dtype, B.shape[2], math.gcd(x.shape[1], 128)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [N, B, C, ...]
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    def grouped(x: jax.Array) -> jax.Array:  # [N, B, C, H, ...] -> [N, B, C, G, H / G, ...]
        return x.reshape(*x.shape[:3], groups, -1, *x.shape[4:])

    dt = jax.nn.softplus(dt.astype(FLOAT32) + dt_bias)
    stepped, inputs, outputs = grouped(chunks(x * dt[..., None])), chunks(B), chunks(C)
    of_chunks = None if documents is None else chunks(documents)  # [N, B, C], with another C
    decay = jnp.moveaxis(grouped(chunks(A * dt)), 2, -1)  # [N, B, G, R, C]
    passed, entered, ratio, left = _decays(decay, None if of_chunks is None else of_chunks[:, :, None, None])
    product = _products(dtype)
    scores = ratio * kept(product("nbigs,nbjgs->nbgij", outputs, inputs))[:, :, :, None]
    inside = product("nbgrij,nbjgrp->nbigrp", scores, stepped)
    added = product("nbjgs,nbjgrp->nbgrps", inputs, jnp.moveaxis(left, -1, 2)[..., None] * stepped)
    between = _between(passed[..., -1], None if of_chunks is None else of_chunks[..., -1])
    before = kept(product("bgrmn,nbgrps->mbgrps", between, added).astype(dtype))
    outside = product("nbigs,nbgrps->nbigrp", outputs, before) * jnp.moveaxis(entered, -1, 2)[..., None]
    return (jnp.moveaxis(inside + outside, 0, 1).reshape(x.shape) + D[:, None] * x).astype(dtype)


def feed_forward(x: jax.Array, gate: Any, up: Any, down: Any, context: Any) -> jax.Array:
    """`down(silu(gate(x)) * up(x))` of three linear layers, which may be of float8."""
    return down(context.operations.swiglu(*context.project(x, gate, up)), context)


def swiglu(gate: jax.Array, up: jax.Array, limit: float = 0.0, alpha: float = 1.0) -> jax.Array:
    """`silu(gate) * up`, rounded once. With a limit `gate sigmoid(alpha gate) (up + 1)` of clamped arrays, as in gpt-oss."""
    return _clamped_swiglu(gate, up, limit, alpha) if limit else _swiglu(gate, up)


@lean
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(gate.astype(FLOAT32)) * up).astype(gate.dtype)


@lean
def _clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    wide, factor = jnp.minimum(gate.astype(FLOAT32), limit), jnp.clip(up.astype(FLOAT32), -limit, limit) + 1
    return (wide * jax.nn.sigmoid(alpha * wide) * factor).astype(gate.dtype)


moe_route, moe_permute, moe_unpermute = plain_experts.moe_route, plain_experts.moe_permute, plain_experts.moe_unpermute
grouped_matmul = plain_experts.grouped_matmul


def scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, *, dtype: Any, transpose_rhs: bool = False
) -> jax.Array:
    """`lhs [M, K] @ rhs [K, N]`, both of float8, times one scale each; rhs is `[N, K]` with transpose_rhs."""
    # the product leaves the matrix unit in the narrow dtype: float32 would be written and read
    product = jnp.einsum("mk,nk->mn" if transpose_rhs else "mk,kn->mn", lhs, rhs, preferred_element_type=dtype)
    return product * (lhs_scale * rhs_scale).astype(dtype)


def quantize_float8(values: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[M, N]` over its scale in float8, the same transposed, and the largest magnitude in float32."""
    most = float(jnp.finfo(dtype).max)
    narrow = jnp.clip(values.astype(FLOAT32) * (1 / scale), -most, most).astype(dtype)
    return narrow, narrow.T, jnp.max(jnp.abs(values)).astype(FLOAT32)


def _products(dtype: Any) -> Callable[..., jax.Array]:
    """`einsum` of operands in `dtype`, with sums and result in float32."""

    def product(spec: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *(operand.astype(dtype) for operand in operands), preferred_element_type=FLOAT32)

    return product


def _unit(x: jax.Array) -> jax.Array:
    wide = x.astype(FLOAT32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + EPSILON)


def _decays(decay: jax.Array, documents: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of logarithms `[N, ..., C]` in chunks: their sums up to each token; what is left at token i of the state before the chunk,
    `[..., C]`, and of token j, `[..., C, C]`; and what is left of token j after the chunk. Nothing is, of another document."""
    passed = jnp.cumsum(decay, axis=-1)
    seen = jnp.tril(jnp.ones((decay.shape[-1],) * 2, bool))
    entered, left = jnp.exp(passed), jnp.exp(passed[..., -1:] - passed)
    if documents is not None:
        last = documents[..., -1:]
        before = jnp.concatenate([documents[:1, ..., :1], last[:-1]])
        seen = seen & (documents[..., :, None] == documents[..., None, :])
        entered, left = jnp.where(documents == before, entered, 0), jnp.where(documents == last, left, 0)
    return passed, entered, jnp.exp(jnp.where(seen, passed[..., :, None] - passed[..., None, :], -jnp.inf)), left


def _between(passed: jax.Array, last: jax.Array | None) -> jax.Array:
    """Of what each chunk's decays sum to, `[N, B, ...]`: the decays from the end of chunk n to the start of m, `[B, ..., N, N]`.
    `last` `[N, B]` are the documents that chunks end with."""
    total = jnp.moveaxis(jnp.cumsum(passed, axis=0), 0, -1)
    start = total - jnp.moveaxis(passed, 0, -1)
    earlier = jnp.tril(jnp.ones((passed.shape[0],) * 2, bool), -1)
    if last is not None:
        before = jnp.concatenate([last[:1], last[:-1]])
        same = jnp.moveaxis(before[:, None] == last[None, :], -1, 0)  # [B, M, N]
        earlier = earlier & same.reshape(same.shape[0], *[1] * (total.ndim - 2), *same.shape[1:])
    return jnp.exp(jnp.where(earlier, start[..., :, None] - total[..., None, :], -jnp.inf))


def _inverse(lower: jax.Array) -> jax.Array:
    """Of 1 + a strictly lower triangular matrix `[..., C, C]`, C a power of two, from diagonal blocks of 1, 2, 4, ..."""
    number = jnp.arange(lower.shape[-1])
    inverse = jnp.eye(lower.shape[-1])
    for size in (2**power for power in range(lower.shape[-1].bit_length() - 1)):
        apart = (number[:, None] // size != number // size) & (number[:, None] // (2 * size) == number // (2 * size))
        inverse = inverse - inverse @ jnp.where(apart, jax.lax.stop_gradient(lower), 0) @ inverse
    # one step of Newton's iteration leaves the value as it is and has the gradient of the inverse
    return 2 * inverse - inverse @ (inverse + lower @ inverse)
