"""The operations that training calls, each in a few lines of `jax.numpy`, to be put in the places of ejkernel's.

They share no code with ejkernel's kernels, so that a mistake common to all of these would show.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    dropout_rng: Any,
    softmax_aux: Any,
    *,
    mask_info: Any,
    sliding_window: Any,
    softmax_scale: Any,
    causal: bool,
    logits_soft_cap: Any,
    **rest: Any,
) -> tuple[Any, Any]:
    """`softmax(mask(cap(scale q.k))) v` in float32, with sinks in the denominator."""
    del dropout_rng, rest
    batch, queries, heads, size = query.shape
    keys, groups = key.shape[1], heads // key.shape[2]
    q, k, v = (array.astype(jnp.float32) for array in (query, jnp.repeat(key, groups, 2), jnp.repeat(value, groups, 2)))
    logits = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * (softmax_scale or size**-0.5)
    logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap) if logits_soft_cap else logits
    logits = logits if bias is None else logits + bias
    visible = jnp.ones((batch, 1, queries, keys), bool)
    if mask_info is not None:
        visible &= mask_info.attention_mask.astype(bool)
    ahead = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    visible &= (ahead <= 0) if causal else True
    if sliding_window is not None:
        left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window, sliding_window)
        visible &= (ahead >= -left) & (ahead <= right)
    weights = jnp.where(visible, jnp.exp(logits - jax.lax.stop_gradient(logits).max(-1, keepdims=True)), 0.0)
    denominator = weights.sum(-1, keepdims=True)
    if softmax_aux is not None:
        sinks = softmax_aux.astype(jnp.float32).reshape(softmax_aux.shape[0], -1)
        sinks = jnp.broadcast_to(sinks, (heads, sinks.shape[1]))[None, :, None, :]
        denominator += jnp.exp(sinks - jax.lax.stop_gradient(logits).max(-1, keepdims=True)).sum(-1, keepdims=True)
    weights = weights / jnp.where(denominator > 0, denominator, 1.0)
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest").astype(query.dtype), weights


def state_space_v1(x: Any, A: Any, B: Any, C: Any, D: Any, dt: Any, *, initial_state: Any, conv_state: Any, **rest: Any) -> Any:
    """Mamba's recurrence, one token after the other."""

    def step(state: Any, token: Any) -> Any:
        x, b, c, dt = token
        state = jnp.exp(dt[..., None] * A) * state + (dt * x)[..., None] * b[:, None, :]
        return state, jnp.einsum("bin,bn->bi", state, c, precision="highest") + D * x

    first = jnp.zeros((x.shape[0], *A.shape), jnp.float32) if initial_state is None else initial_state
    state, y = jax.lax.scan(step, first, tuple(jnp.moveaxis(one, 1, 0) for one in (x, B, C, dt)))
    gated = jnp.moveaxis(y, 0, 1) * (1.0 if rest["gate"] is None else rest["act_fn"](rest["gate"]))
    return gated, state, conv_state


def state_space_v2(x: Any, A: Any, B: Any, C: Any, D: Any, dt: Any, *, initial_state: Any, conv_state: Any, **rest: Any) -> Any:
    """Mamba-2's recurrence, one token after the other; no gate, no norm."""
    assert rest["gate"] is None and not rest["use_gated_rmsnorm"]
    B, C = (jnp.repeat(one, x.shape[2] // one.shape[2], 2) for one in (B, C))

    def step(state: Any, token: Any) -> Any:
        x, b, c, dt = token
        decay = jnp.exp(dt * A)[..., None, None]
        state = decay * state + jnp.einsum("bhp,bhn->bhpn", x * dt[..., None], b, precision="highest")
        return state, jnp.einsum("bhpn,bhn->bhp", state, c, precision="highest") + D[:, None] * x

    first = jnp.zeros((*x.shape[:1], *x.shape[2:], B.shape[-1]), jnp.float32) if initial_state is None else initial_state
    state, y = jax.lax.scan(step, first, tuple(jnp.moveaxis(one, 1, 0) for one in (x, B, C, dt)))
    return jnp.moveaxis(y, 0, 1).reshape(*x.shape[:2], -1), state, conv_state


def gated_delta_rule(q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any, *, use_qk_l2norm: bool, **rest: Any) -> Any:
    """The delta rule with one decay per head, one token after the other."""
    del rest
    if use_qk_l2norm:
        q, k = (x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))

    def step(state: Any, token: Any) -> Any:
        q, k, v, beta, decay = token
        state = jnp.exp(decay)[..., None, None] * state
        found = jnp.einsum("bhdv,bhd->bhv", state, k, precision="highest")
        state += jnp.einsum("bhd,bhv->bhdv", k, beta[..., None] * (v - found), precision="highest")
        return state, jnp.einsum("bhdv,bhd->bhv", state, q, precision="highest") * q.shape[-1] ** -0.5

    first = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), jnp.float32) if state is None else state
    state, y = jax.lax.scan(step, first, tuple(jnp.moveaxis(one, 1, 0) for one in (q, k, v, beta, decay)))
    return jnp.moveaxis(y, 0, 1), state


def grouped_matmul(lhs: Any, rhs: Any, group_sizes: Any, *, preferred_element_type: Any, **rest: Any) -> Any:
    """Every row times the matrix of its group; rows past the last group give 0."""
    assert not rest.get("transpose_rhs")
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(lhs.shape[0])[:, None]
    member = (rows < ends) & (rows >= ends - group_sizes)
    return jnp.einsum("mk,mg,gkn->mn", lhs, member.astype(lhs.dtype), rhs, precision="highest").astype(preferred_element_type)


PLACES = {
    "easydel.operations.kernels.vanilla_attention": attention,
    "easydel.operations.kernels.ssm1": state_space_v1,
    "easydel.operations.kernels.ssm2": state_space_v2,
    "easydel.operations.kernels.gated_delta_rule": gated_delta_rule,
    "easydel.layers.moe._moe_module": grouped_matmul,
}
"""Modules of EasyDeL and what each calls."""


@contextlib.contextmanager
def in_place() -> Generator[None]:
    """Let EasyDeL's vanilla mechanism, state spaces, delta rule and experts call the functions above."""
    modules = {importlib.import_module(name): function for name, function in PLACES.items()}
    before = {module: getattr(module, function.__name__) for module, function in modules.items()}
    for module, function in modules.items():
        setattr(module, function.__name__, function)
    try:
        yield
    finally:
        for module, function in before.items():
            setattr(module, modules[module].__name__, function)
