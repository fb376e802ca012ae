"""`causal_conv1d` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import cases_named, check_case, check_vmap, problems

import ejkernel


def _drawn(length: int = 9, channels: int = 5, width: int = 4) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (2, length, channels)),
        jax.random.normal(keys[1], (channels, width)),
        jax.random.normal(keys[2], (channels,)),
    )


@problems("causal_conv1d")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("causal_conv1d", case, dtype)


@cases_named("causal_conv1d", "state", "segments", "packed")
def test_vmap(case: Any) -> None:
    check_vmap("causal_conv1d", case)


@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_equals_a_grouped_convolution(width: int) -> None:
    x, weight, bias = _drawn(width=width)
    expected = jax.lax.conv_general_dilated(
        x,
        weight.T[:, None],
        (1,),
        [(width - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[2],
        precision="highest",
    )
    out = ejkernel.causal_conv1d(x, weight, bias, activation="silu")
    np.testing.assert_allclose(out, jax.nn.silu(expected + bias[None, None]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pieces", [(1,) * 9, (4, 5), (2, 0, 7)])
def test_pieces_with_their_state_equal_the_whole(pieces: tuple[int, ...]) -> None:
    x, weight, bias = _drawn()
    state, outs, start = jnp.zeros((2, 3, 5)), [], 0
    for size in pieces:
        out, state = ejkernel.causal_conv1d(x[:, start : start + size], weight, bias, initial_state=state, return_state=True)
        outs.append(out)
        start += size
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), ejkernel.causal_conv1d(x, weight, bias), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state, x[:, -3:])


def test_packed_equals_padded_rows_with_segments() -> None:
    x, weight, bias = _drawn()
    packed = jnp.concatenate([x[0, :6], x[1, :4]])[None]
    out = ejkernel.causal_conv1d(packed, weight, bias, cu_seqlens=jnp.array([0, 6, 10]))
    ids = jnp.where(jnp.arange(9)[None] < jnp.array([[6], [4]]), 0, -1)
    rows = ejkernel.causal_conv1d(x, weight, bias, seg_ids=ids)
    np.testing.assert_allclose(out[0, :6], rows[0, :6], rtol=1e-6)
    np.testing.assert_allclose(out[0, 6:], rows[1, :4], rtol=1e-6)


def test_traced_lengths_share_one_program() -> None:
    traces = []

    @jax.jit
    def convolved(x: Any, cu_seqlens: Any) -> Any:
        traces.append(1)
        return ejkernel.causal_conv1d(x, jnp.ones((1, 2)), cu_seqlens=cu_seqlens)

    x = jnp.arange(1, 7, dtype=jnp.float32)[None, :, None]
    np.testing.assert_array_equal(convolved(x, jnp.array([0, 2, 6]))[0, :, 0], [1, 3, 3, 7, 9, 11])
    np.testing.assert_array_equal(convolved(x, jnp.array([0, 5, 5]))[0, :, 0], [1, 3, 5, 7, 9, 0])
    assert len(traces) == 1
