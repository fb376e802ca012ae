"""Public functions over time: what comes later changes nothing before, bit for bit. Operations themselves are held by the suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

B, T, H, D = 1, 40, 2, 8
CUT = 23
"""The first token that is late: of the second chunk of every function here, and the middle of it."""


def inputs(*names: str, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Arguments over time by name; what decays is negative, steps are positive."""
    rng = np.random.default_rng(0)
    shapes: Mapping[str, tuple[int, ...]] = {
        **dict.fromkeys(("query", "key", "value", "r", "k", "v", "a", "b", "B", "C", "x", "by_channel"), (B, T, H, D)),
        **dict.fromkeys(("beta", "decay", "dt", "trap", "input_gate", "forget_gate"), (B, T, H)),
        "w": (B, T, H, D),
        "angles": (B, T, 1, 2),
        **dict.fromkeys(("wide", "step"), (B, T, 6)),
        **dict.fromkeys(("b_state", "c_state"), (B, T, 4)),
        "latent": (B, T, D),
    }
    found = {}
    for name in names:
        value = rng.standard_normal(shapes[name])
        if name in ("decay", "w", "by_channel"):
            value = -np.abs(value)
        elif name in ("dt", "step", "beta"):
            value = np.abs(value) / 2
        found[name] = jnp.asarray(value, dtype)
    return found


def weight(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)


RATES = -jnp.abs(weight(H))
FORMS: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "mamba3": (
        lambda x, B, C, dt, trap, angles: ejkernel.mamba3(x, RATES, B, C, None, dt, trap, angles)[0],
        ("x", "B", "C", "dt", "trap", "angles"),
    ),
    "rwkv6": (lambda r, k, v, w: ejkernel.rwkv6(r, k, v, w, weight(H, D)), ("r", "k", "v", "w")),
    "rwkv7": (lambda r, w, k, v, a, b: ejkernel.rwkv7(r, w, k, v, a / 8, b / 8), ("r", "w", "k", "v", "a", "b")),
    "rwkv4": (lambda k, v: ejkernel.rwkv4(-jnp.ones(6), jnp.ones(6), k, v), ("wide", "step")),
    "retention": (ejkernel.retention, ("query", "key", "value")),
    "gla_attention": (lambda q, k, v, g: ejkernel.gla_attention(q, k, v, g=g), ("query", "key", "value", "by_channel")),
    "lightning_attention": (
        lambda q, k, v: ejkernel.lightning_attention(q, k, v, layer_idx=1, num_layers=4),
        ("query", "key", "value"),
    ),
    "gated_delta_rule": (
        lambda q, k, v, b, g: ejkernel.gated_delta_rule(q, k, v, b, decay=g),
        ("query", "key", "value", "beta", "decay"),
    ),
    "kernel_delta_attention": (
        lambda q, k, v, b, g: ejkernel.kernel_delta_attention(q, k, v, b, decay=g),
        ("query", "key", "value", "beta", "by_channel"),
    ),
    "state_space_v1": (
        lambda x, B, C, dt: ejkernel.state_space_v1(x, -jnp.ones((6, 4)), B, C, jnp.ones(6), dt),
        ("wide", "b_state", "c_state", "step"),
    ),
    "state_space_v2": (
        lambda x, B, C, dt: ejkernel.state_space_v2(x, RATES, B, C, jnp.ones(H), dt),
        ("x", "B", "C", "dt"),
    ),
    "mlstm": (ejkernel.mlstm, ("query", "key", "value", "input_gate", "forget_gate")),
    "causal_conv1d": (lambda x: ejkernel.causal_conv1d(x, weight(6, 4).astype(x.dtype)), ("wide",)),
    "flash_attention": (lambda q, k, v: ejkernel.flash_attention(q, k, v, causal=True), ("query", "key", "value")),
    "attention": (lambda q, k, v: ejkernel.attention(q, k, v, causal=True)[0], ("query", "key", "value")),
    "ring_attention": (lambda q, k, v: ejkernel.ring_attention(q, k, v, causal=True), ("query", "key", "value")),
    "native_sparse_attention": (
        lambda q, k, v, g: ejkernel.native_sparse_attention(
            q, k, v, g_cmp=jax.nn.sigmoid(g), g_slc=jax.nn.sigmoid(g), block_counts=2, block_size=8
        ),
        ("query", "key", "value", "beta"),
    ),
}


def outputs(form: str, given: Mapping[str, Any]) -> Any:
    found = FORMS[form][0](*(given[name] for name in FORMS[form][1]))
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_later_values_change_nothing_before(form: str, dtype: str) -> None:
    given = inputs(*FORMS[form][1], dtype=jnp.dtype(dtype))
    run = jax.jit(lambda given: outputs(form, given))

    def gradients(given: Mapping[str, Any]) -> Any:
        return jax.grad(lambda given: jnp.sum(jnp.sin(outputs(form, given)[:, :CUT].astype(jnp.float32))))(given)

    pull = jax.jit(gradients)
    clean, slopes = run(given), pull(given)
    assert np.isfinite(np.asarray(clean, np.float32)).all()
    for factor in (1e3, jnp.nan):
        changed = {name: value.at[:, CUT:].multiply(jnp.asarray(factor, value.dtype)) for name, value in given.items()}
        np.testing.assert_array_equal(run(changed)[:, :CUT], clean[:, :CUT])
        if factor == 1e3 and np.isfinite(np.asarray(run(changed), np.float32)).all():  # a cotangent of 0 times infinity is NaN
            for name, slope in pull(changed).items():
                np.testing.assert_array_equal(slope[:, :CUT], slopes[name][:, :CUT], name)
                assert not np.any(np.asarray(slope, np.float32)[:, CUT:]), name
