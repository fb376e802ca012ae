"""`scaled_matmul` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.plugin import Target
from ejkernel_xla.scaled_matmul.config import ScaledMatmulConfig, heuristic, search_space
from ejkernel_xla.scaled_matmul.kernel import forward

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@problems("scaled_matmul")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("scaled_matmul", case, dtype)


@cases_named("scaled_matmul", "float8", "float8-one-scale", "int8-transposed-one-scale")
def test_vmap(case: Any) -> None:
    check_vmap("scaled_matmul", case)


def _drawn(left: Any, right: Any) -> tuple[Any, Any]:
    draw = lambda seed, shape, dtype: (8 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)
    return draw(0, (6, 32), left), draw(1, (32, 5), right)


@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (jnp.int8, jnp.int8)])
@pytest.mark.parametrize("precision", [None, "default", "highest"])
def test_xla_is_given_the_stored_arrays(left: Any, right: Any, precision: str | None) -> None:
    """A GPU's float8 or int8 product is found where one product has operands of that dtype; float8 is summed in float32 there
    unless the precision is the default one."""
    lhs, rhs = _drawn(left, right)
    bound = get_operation("scaled_matmul").canonicalise(lhs, rhs, jnp.ones(6), jnp.ones(5), precision=precision)
    gpu = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
    config = heuristic(bound.call, gpu)
    assert config == ScaledMatmulConfig("stored") and config in search_space(bound.call, gpu)
    program: Any = jax.make_jaxpr(lambda inputs: forward(bound.call, inputs, config))(bound.inputs)
    (product,) = [one for one in program.eqns if one.primitive.name == "dot_general"]
    assert [one.aval.dtype for one in product.invars] == [lhs.dtype, rhs.dtype]
    assert product.outvars[0].aval.dtype == (jnp.int32 if left == jnp.int8 else jnp.float32)
    expected = jax.lax.Precision[(precision or "highest").upper()]
    assert product.params["precision"] == (expected, expected)


@pytest.mark.parametrize(
    ("precision", "out_dtype", "scale", "capability"),
    [("highest", None, 1, "9.0"), (None, "float32", 1, "9.0"), ("default", None, 6, "9.0"), ("default", None, 1, "8.0")],
)
def test_scales_stay_outside_where_xla_would_round_before_them(
    precision: str | None, out_dtype: str | None, scale: int, capability: str
) -> None:
    lhs, rhs = _drawn(E4M3, E5M2)
    scales = jnp.ones(6) if scale == 6 else jnp.float32(1), jnp.float32(1)
    bound = get_operation("scaled_matmul").canonicalise(lhs, rhs, *scales, out_dtype=out_dtype, precision=precision)
    assert heuristic(bound.call, Target("gpu", "NVIDIA", capability)) == ScaledMatmulConfig("stored")


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_scales_of_matrices_are_in_the_operands(out_dtype: str) -> None:
    """As XLA's rewriter for float8 looks for them: converted to the dtype of the product, times a broadcast scale."""
    lhs, rhs = _drawn(E4M3, E5M2)
    scales = jnp.float32(0.013), jnp.float32(1 / 3)
    bound = get_operation("scaled_matmul").canonicalise(lhs, rhs, *scales, out_dtype=out_dtype, precision="default")
    gpu = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
    config = heuristic(bound.call, gpu)
    assert config == ScaledMatmulConfig("scaled") == search_space(bound.call, gpu)[0]
    run: Any = lambda inputs: forward(bound.call, inputs, config).out
    program: Any = jax.make_jaxpr(run)(bound.inputs)
    (product,) = [one for one in program.eqns if one.primitive.name == "dot_general"]
    assert [one.aval.dtype for one in (*product.invars, *product.outvars)] == [jnp.dtype(out_dtype)] * 3
    wide = forward(bound.call, bound.inputs, ScaledMatmulConfig("stored")).out
    np.testing.assert_allclose(run(bound.inputs).astype(jnp.float32), wide.astype(jnp.float32), rtol=0.02, atol=0.2)


def test_int8_is_summed_exactly() -> None:
    """Where sums pass 2^24, float32 could not hold them."""
    lhs = jnp.full((1, 4097), 127, jnp.int8)
    one = jnp.float32(1)
    out = ejkernel.scaled_matmul(lhs, lhs, one, one, transpose_rhs=True, out_dtype=jnp.float32, platform="xla")
    assert int(out[0, 0]) == int(np.float32(4097 * 127 * 127))
    bound = get_operation("scaled_matmul").canonicalise(lhs, lhs, one, one, transpose_rhs=True)
    product = jax.make_jaxpr(lambda inputs: forward(bound.call, inputs, ScaledMatmulConfig()))(bound.inputs)
    assert "preferred_element_type=int32" in str(product)


@pytest.mark.parametrize("out_dtype", [None, jnp.bfloat16, "float16"])
def test_results_are_rounded_once(out_dtype: Any) -> None:
    lhs, rhs = _drawn(E4M3, E4M3)
    run = lambda dtype: ejkernel.scaled_matmul(lhs, rhs, jnp.float32(0.013), jnp.ones(5), out_dtype=dtype, platform="xla")
    got = run(out_dtype)
    assert got.dtype == (out_dtype or jnp.bfloat16)
    np.testing.assert_array_equal(got, run("float32").astype(got.dtype))


def test_arrays_of_one_byte_have_no_gradient() -> None:
    lhs, rhs = _drawn(E4M3, E5M2)
    out, pull = jax.vjp(lambda *arrays: ejkernel.scaled_matmul(*arrays, platform="xla"), lhs, rhs, jnp.ones(6), jnp.float32(1))
    d_lhs, d_rhs, d_rows, d_one = pull(jnp.ones_like(out))
    assert not np.asarray(d_lhs, np.float32).any() and not np.asarray(d_rhs, np.float32).any()
    wide = lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    np.testing.assert_allclose(d_rows, wide.sum(axis=1), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(d_one, wide.sum(), rtol=1e-5, atol=1e-3)


def test_class_form_and_second_order() -> None:
    lhs, rhs = _drawn(jnp.int8, jnp.int8)
    scales = jnp.linspace(0.5, 1, 6), jnp.linspace(0.01, 0.02, 5)
    np.testing.assert_array_equal(ejkernel.ScaledMatmul()(lhs, rhs, *scales), ejkernel.scaled_matmul(lhs, rhs, *scales))
    wide = (lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)) / 32
    check_second_order(
        lambda rows, columns: ejkernel.scaled_matmul(lhs, rhs, rows / 32, columns, out_dtype=jnp.float32),
        lambda rows, columns: wide * rows[:, None] * columns[None],
        *scales,
    )


def test_unknown_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="operands: got 'int4', expected one of stored, scaled, bfloat16, float32"):
        ScaledMatmulConfig("int4")
