"""Norms of rows whose mean is far above their spread, and of rows whose squares overflow or underflow float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call.case import Case
from ejkernel.operations.common.rows.cases import norm_arrays
from ejkernel.testing.problem import Problem
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close

WIDTH = 8


@pytest.mark.parametrize(("shift", "magnitude"), [(1449.5, 0.45), (-1e5, 3.0), (1e20, 1e19)])
def test_layer_norm_of_rows_far_from_zero(shift: float, magnitude: float) -> None:
    arrays = norm_arrays(5, 64, offset=True, shift=shift, magnitude=magnitude)
    problem = Problem("layer_norm", Case("far", arrays, {"epsilon": 1e-5}), "float32", "xla")
    check_close("out", problem.outputs()["out"], problem.expected_outputs.out, FORWARD["float32"])
    for name, value in problem.gradients().items():
        check_close(name, value, problem.expected_gradients[name], GRADIENT["float32"])


@pytest.mark.parametrize("magnitude", [1e-25, 1e-12, 1.0, 1e18, 3e19, 1e25, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", ["rms_norm", "layer_norm"])
def test_squares_neither_overflow_nor_vanish(operation: str, dtype: str, magnitude: float) -> None:
    arrays = norm_arrays(5, 64, magnitude=magnitude)
    problem = Problem(operation, Case("range", arrays, {"epsilon": 1e-6}), dtype, "xla")
    check_close("out", problem.outputs()["out"], problem.expected_outputs.out, FORWARD[dtype])
    for name, value in problem.gradients().items():
        check_close(name, value, problem.expected_gradients[name], GRADIENT[dtype])


def test_fused_norms_of_large_rows() -> None:
    row = np.array([3e19, -4e19, 0, 0, 0, 0, 0, 0], np.float32)
    right = row / np.sqrt((row.astype(np.float64) ** 2).mean())
    x = jnp.asarray(row)[None, None]
    normed, _ = ejkernel.fused_add_rms_norm(x, jnp.zeros_like(x))
    np.testing.assert_allclose(normed[0, 0], right, rtol=1e-6)
    angles = jnp.ones((1, WIDTH // 2)), jnp.zeros((1, WIDTH // 2))
    query, key = ejkernel.fused_qk_norm_rope(x[:, :, None], x[:, :, None], *angles)
    np.testing.assert_allclose(query[0, 0, 0], right, rtol=1e-6)
    np.testing.assert_allclose(key[0, 0, 0], right, rtol=1e-6)


def test_length_of_large_queries_and_keys() -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, WIDTH))
    beta = jnp.full((1, 5, 2), 0.5)
    wanted = ejkernel.gated_delta_rule(query, key, value, beta, use_qk_l2norm=True, platform="xla")
    found = ejkernel.gated_delta_rule(2.0**80 * query, 2.0**80 * key, value, beta, use_qk_l2norm=True, platform="xla")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
