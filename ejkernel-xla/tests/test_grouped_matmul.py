"""`grouped_matmul` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel
from ejkernel.operations import get_operation
from ejkernel_xla.grouped_matmul.config import GroupedMatmulConfig
from ejkernel_xla.grouped_matmul.kernel import backward, forward


@problems("grouped_matmul")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("grouped_matmul", case, dtype)


@cases_named("grouped_matmul", "plain", "empty-groups", "square-transposed", "existing-out", "shard-of-groups")
def test_vmap(case: Any) -> None:
    check_vmap("grouped_matmul", case)


def test_second_order_and_jit() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = jax.random.normal(keys[0], (4, 2)), jax.random.normal(keys[1], (2, 2, 2))
    check_second_order(
        lambda lhs, rhs: ejkernel.grouped_matmul(lhs, rhs, jnp.array([1, 2])),
        lambda lhs, rhs: jnp.concatenate([lhs[:1] @ rhs[0], lhs[1:3] @ rhs[1], jnp.zeros((1, 2))]),
        lhs,
        rhs,
    )


@pytest.mark.parametrize("block_m", [1, 3, 8, 64])
@pytest.mark.parametrize("tiles_per_step", [1, 2, 5, 1000])
def test_every_config_gives_the_same(block_m: int, tiles_per_step: int) -> None:
    lhs = jax.random.normal(jax.random.key(0), (23, 6)).at[17:].set(jnp.nan)
    rhs, sizes = jax.random.normal(jax.random.key(1), (5, 6, 4)), jnp.array([3, 0, 9, 5, 0])
    operation = get_operation("grouped_matmul")
    bound = operation.canonicalise(lhs, rhs, sizes)
    config = GroupedMatmulConfig(block_m, tiles_per_step)
    out = forward(bound.call, bound.inputs, config)
    cotangent = type(out)(jnp.cos(jnp.arange(23 * 4.0)).reshape(1, 23, 4))
    gradients = backward(bound.call, bound.inputs, out, cotangent, config)
    rows = [slice(0, 3), slice(3, 3), slice(3, 12), slice(12, 17), slice(17, 17)]
    for matrix, group in enumerate(rows):
        assert_close(out.out[0, group], lhs[group] @ rhs[matrix], 1e-6)
        assert_close(gradients.rhs[0, matrix], lhs[group].T @ cotangent.out[0, group], 1e-6)
        assert_close(gradients.lhs[0, group], cotangent.out[0, group] @ rhs[matrix].T, 1e-6)
    np.testing.assert_array_equal(out.out[0, 17:], 0)
    np.testing.assert_array_equal(gradients.lhs[0, 17:], 0)


def test_mixed_dtypes_multiply_in_the_common_one() -> None:
    lhs = jax.random.normal(jax.random.key(0), (8, 16), jnp.bfloat16)
    rhs = jax.random.normal(jax.random.key(1), (2, 16, 4), jnp.float32)
    sizes = jnp.array([5, 3])
    exact = jnp.concatenate([lhs[:5].astype(jnp.float32) @ rhs[0], lhs[5:].astype(jnp.float32) @ rhs[1]])
    out = ejkernel.grouped_matmul(lhs, rhs, sizes)
    assert out.dtype == jnp.float32
    assert_close(out, exact, 1e-6)
    narrow = ejkernel.grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(narrow, exact.astype(jnp.bfloat16))
    d_lhs, d_rhs = jax.grad(lambda lhs, rhs: jnp.sum(ejkernel.grouped_matmul(lhs, rhs, sizes)), argnums=(0, 1))(lhs, rhs)
    assert (d_lhs.dtype, d_rhs.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(d_rhs[1], jnp.broadcast_to(lhs[5:].astype(jnp.float32).sum(0)[:, None], (16, 4)), 1e-6)


def test_shards_of_groups_add_up_inside_a_traced_offset() -> None:
    lhs, rhs = jax.random.normal(jax.random.key(0), (20, 6)), jax.random.normal(jax.random.key(1), (4, 6, 3))
    sizes = jnp.array([4, 0, 9, 5])

    @jax.jit
    def shard(offset: Any) -> Any:
        local = jax.lax.dynamic_slice_in_dim(rhs, offset, 2)
        return ejkernel.grouped_matmul(lhs, local, sizes, group_offset=offset)

    assert_close(shard(0) + shard(2), ejkernel.grouped_matmul(lhs, rhs, sizes), 1e-6)
    np.testing.assert_array_equal(shard(2)[:4], 0)
    chained = ejkernel.grouped_matmul(lhs, rhs[2:], sizes, group_offset=2, existing_out=shard(0))
    assert_close(chained, jax.lax.ragged_dot(lhs, rhs, sizes), 1e-6)


def test_float8_is_exact_and_rounds_once() -> None:
    """Sums of float8 products are those of float64 to float32's rounding; results are bfloat16 unless asked for otherwise."""
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((9, 300)), jnp.float8_e4m3fn)
    rhs = jnp.asarray(rng.standard_normal((2, 5, 300)), jnp.float8_e5m2)
    rows, columns = (jnp.asarray(rng.uniform(0.01, 0.1, shape), jnp.float32) for shape in (9, (2, 5)))
    sizes = jnp.array([4, 3])

    def product(existing: Any = None, scale: Any = rows, **options: Any) -> Any:
        return ejkernel.grouped_matmul(
            lhs, rhs, sizes, lhs_scale=scale, rhs_scale=columns, existing_out=existing, transpose_rhs=True, **options
        )

    wide = [np.asarray(value, np.float64) for value in (lhs, rhs, rows, columns)]
    wanted = np.zeros((9, 5))
    for group, own in enumerate((slice(0, 4), slice(4, 7))):
        wanted[own] = wide[0][own] @ wide[1][group].T * wide[2][own, None] * wide[3][group]
    exact = product(preferred_element_type=jnp.float32)
    assert_close(exact, wanted, 3e-7)
    assert product().dtype == jnp.bfloat16
    np.testing.assert_array_equal(product(), exact.astype(jnp.bfloat16))
    added = product(jnp.full((9, 5), 7, jnp.bfloat16))
    np.testing.assert_array_equal(added[7:], 7)
    halved = product(scale=0.5, preferred_element_type="float32")
    assert_close(halved, wanted / (2 * wide[2][:, None]), 3e-7)


def test_gradients_of_a_product_in_float8_are_those_of_scales_bias_and_what_is_there() -> None:
    lhs, rhs = (jnp.ones(shape, jnp.float8_e4m3fn) for shape in ((4, 8), (2, 8, 3)))
    about = {"lhs_scale": jnp.float32(2), "rhs_scale": jnp.ones(2), "bias": jnp.ones((2, 3)), "existing_out": jnp.ones((4, 3))}

    def loss(about: Any) -> Any:
        return jnp.sum(ejkernel.grouped_matmul(lhs, rhs, jnp.array([2, 1]), preferred_element_type="float32", **about))

    found = jax.jit(jax.grad(loss))(about)
    np.testing.assert_array_equal(found["lhs_scale"], 3 * 8 * 3)
    np.testing.assert_array_equal(found["rhs_scale"], [2 * 2 * 8 * 3, 2 * 8 * 3])
    np.testing.assert_array_equal(found["bias"], [[2] * 3, [1] * 3])
    np.testing.assert_array_equal(found["existing_out"].sum(axis=1), [0, 0, 0, 3])
