"""`fused_add_rms_norm` and `fused_qk_norm_rope` on XLA: against the reference, and against what they fuse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel


def arrays(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[Any]:
    return [jax.random.normal(jax.random.key(seed), shape, dtype) for seed, shape in enumerate(shapes)]


@problems("add_rms_norm")
def test_add_rms_norm_against_reference(case: Any, dtype: str) -> None:
    check_case("add_rms_norm", case, dtype)


@problems("qk_norm_rope")
def test_qk_norm_rope_against_reference(case: Any, dtype: str) -> None:
    check_case("qk_norm_rope", case, dtype)


@cases_named("add_rms_norm", "gemma", "middle-axis", "one-axis")
def test_vmap_of_add_rms_norm(case: Any) -> None:
    check_vmap("add_rms_norm", case)


@cases_named("qk_norm_rope", "gqa", "per-channel", "partial-interleaved", "heads-first")
def test_vmap_of_qk_norm_rope(case: Any) -> None:
    check_vmap("qk_norm_rope", case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-4])
def test_the_norm_reads_the_sum_that_is_returned(dtype: str, magnitude: float) -> None:
    """Bit by bit: of the rounded sum, also where XLA would rather keep it in float32, and down to the smallest numbers."""
    x, residual, scale = (magnitude * one for one in arrays((64, 256), (64, 256), (256,), dtype=dtype))
    out, total = jax.jit(lambda *a: ejkernel.fused_add_rms_norm(*a, platform="xla"))(x, residual, scale)
    np.testing.assert_array_equal(total, x + residual)
    expected = ejkernel.rms_norm(total, scale, platform="xla")
    assert out.dtype == total.dtype == dtype
    limit = 0 if dtype != "float32" else 3e-7  # sums of another order
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), rtol=limit)


@pytest.mark.parametrize(("of_x", "of_residual"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_the_stream_keeps_its_dtype(of_x: str, of_residual: str) -> None:
    x, residual, scale, d_out, d_sum = arrays((8, 64), (8, 64), (64,), (8, 64), (8, 64))
    given = x.astype(of_x), residual.astype(of_residual), scale
    (out, total), pull = jax.vjp(ejkernel.fused_add_rms_norm, *given)
    assert (out.dtype, total.dtype) == (of_x, of_residual)
    gradients = pull((d_out.astype(of_x), d_sum.astype(of_residual)))
    assert [one.dtype for one in gradients] == [one.dtype for one in given]
    wide = [one.astype(jnp.float32) for one in given]
    exact, exact_pull = jax.vjp(ejkernel.fused_add_rms_norm, *wide)
    for got, wanted in zip((out, total, *gradients), (*exact, *exact_pull((d_out, d_sum))), strict=True):
        assert_close(got, wanted, 2e-2)


def test_add_rms_norm_to_second_order() -> None:
    def plain(x: Any, residual: Any, scale: Any) -> Any:
        total = x + residual
        return total / jnp.sqrt(jnp.mean(total**2, -1, keepdims=True) + 1e-3) * (scale + 1)[None], total

    check_second_order(
        lambda *a: ejkernel.fused_add_rms_norm(*a, epsilon=1e-3, scale_offset=1.0), plain, *arrays((3, 5), (3, 5), (5,))
    )


@pytest.mark.parametrize("unused", [0, 1])
def test_a_result_that_nobody_reads_has_no_cotangent(unused: int) -> None:
    """A loss of the norm alone, or of the sum alone."""
    given = arrays((3, 5), (3, 5), (5,))

    def plain(x: Any, residual: Any, scale: Any) -> Any:
        return ejkernel.rms_norm(x + residual, scale), x + residual

    got, wanted = (
        jax.grad(lambda *a, f=f: jnp.sum(f(*a)[1 - unused] ** 3), (0, 1, 2))(*given)
        for f in (ejkernel.fused_add_rms_norm, plain)
    )
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-5)


def test_qk_norm_rope_is_a_norm_and_a_rotation() -> None:
    given = arrays((2, 5, 4, 16), (2, 5, 2, 16), (5, 6), (5, 6), (16,), (16,))
    options = {"epsilon": 1e-3, "scale_offset": 1.0}
    q, k, cos, sin, q_scale, k_scale = given
    normed = ejkernel.rms_norm(q, q_scale, **options), ejkernel.rms_norm(k, k_scale, **options)
    wanted = ejkernel.llama_rope(*normed, cos, sin, rotary_dim=12)
    for one, other in zip(ejkernel.fused_qk_norm_rope(*given, rotary_dim=12, **options), wanted, strict=True):
        assert_close(one, other, 1e-6)


def test_qk_norm_rope_to_second_order() -> None:
    def plain(q: Any, k: Any, cos: Any, sin: Any, q_scale: Any, k_scale: Any) -> Any:
        def one(x: Any, scale: Any) -> Any:
            first, second, rest = jnp.split(
                x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3) * (scale + 1)[None, None, None], (2, 4), -1
            )
            c, s = cos[None, :, None], sin[None, :, None]
            return jnp.concatenate([first * c - second * s, second * c + first * s, rest], -1)

        return one(q, q_scale), one(k, k_scale)

    def fused(*given: Any) -> Any:
        return ejkernel.fused_qk_norm_rope(*given, rotary_dim=4, epsilon=1e-3, scale_offset=1.0)

    check_second_order(fused, plain, *arrays((1, 2, 2, 5), (1, 2, 1, 5), (2, 2), (2, 2), (5,), (5,)))


def test_class_forms_and_explain() -> None:
    x, residual = arrays((3, 8), (3, 8))
    for got, wanted in zip(ejkernel.FusedAddRmsNorm()(x, residual), ejkernel.fused_add_rms_norm(x, residual), strict=True):
        np.testing.assert_array_equal(got, wanted)
    q, k, cos, sin = arrays((1, 3, 2, 8), (1, 3, 1, 8), (3, 4), (3, 4))
    for got, wanted in zip(
        ejkernel.FusedQkNormRope()(q, k, cos, sin), ejkernel.fused_qk_norm_rope(q, k, cos, sin), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    assert ejkernel.explain("fused_add_rms_norm", x, residual).chosen == "xla"
    assert ejkernel.explain(ejkernel.fused_qk_norm_rope, q, k, cos, sin).chosen == "xla"
