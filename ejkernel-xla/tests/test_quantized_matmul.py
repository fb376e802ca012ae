"""`quantized_matmul` on XLA."""

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
from ejkernel.quantization import dequantize, prepack_quantized_weights, quantize
from ejkernel_xla.quantized_matmul.config import QuantizedMatmulConfig
from ejkernel_xla.quantized_matmul.kernel import backward, forward


@problems("quantized_matmul")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("quantized_matmul", case, dtype)


@cases_named("quantized_matmul", "affine-4", "affine-6-transposed", "nvfp4")
def test_vmap(case: Any) -> None:
    check_vmap("quantized_matmul", case)


def _drawn(mode: str, bits: int | None, transpose: bool, group: int | None) -> tuple[Any, ...]:
    w = jax.random.normal(jax.random.key(0), (96, 160))
    x = jax.random.normal(jax.random.key(1), (7, 160 if transpose else 96))
    return x, *prepack_quantized_weights(w, group, bits, mode)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("mode", "bits", "group"), [("affine", 4, 32), ("affine", 3, 16), ("affine", 5, 10), ("mxfp4", None, None)]
)
def test_every_block_gives_the_same(mode: str, bits: int | None, group: int | None, transpose: bool) -> None:
    """Blocks of one column up to all, also where the last one is not full; against the weights as a whole."""
    x, *packed = _drawn(mode, bits, transpose, group)
    bound = get_operation("quantized_matmul").canonicalise(
        x, *packed, mode=mode, bits=bits, group_size=group, transpose=transpose
    )
    dense = lambda x, *floats: (
        x
        @ (lambda w: w.T if transpose else w)(
            dequantize(packed[0], *(floats or packed[1:]), mode=mode, bits=bits, group_size=group)
        )
    )
    moving = (x, *packed[1:]) if mode == "affine" else (x,)
    expected, pull = jax.vjp(dense, *moving)
    cotangent = jnp.cos(jnp.arange(expected.size * 1.0)).reshape(expected.shape)
    gradients = pull(cotangent)
    for block in (1, 40, 64, 1000):
        config = QuantizedMatmulConfig(block)
        out = forward(bound.call, bound.inputs, config)
        assert_close(out.out[0], expected, 1e-6)
        found = backward(bound.call, bound.inputs, out, type(out)(cotangent[None]), config)
        assert found.w is None and (mode == "affine" or found.scales is None)
        for name, gradient in zip(("x", "scales", "zeros"), gradients, strict=False):
            assert_close(getattr(found, name)[0], gradient, 2e-6, name)


@pytest.mark.parametrize("transpose", [False, True])
def test_weights_are_never_whole_in_memory(transpose: bool) -> None:
    """The temporaries of value and gradient stay below a quarter of the unpacked weights."""
    x = jnp.ones((4, 2048))
    packed = quantize(jnp.zeros((4096, 2048) if transpose else (2048, 4096)))
    loss = lambda x, *packed: jnp.sum(jnp.sin(ejkernel.quantized_matmul(x, *packed, transpose=transpose, platform="xla")))
    program = jax.jit(jax.value_and_grad(loss)).lower(x, *packed).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 2048 * 4096 * 4 / 4


def _experts(mode: str, *, transpose: bool) -> tuple[Any, ...]:
    """Rows, packed weights of four experts and what they stand for, `[4,64,96]`."""
    w = jax.random.normal(jax.random.key(2), (4, 96, 64) if transpose else (4, 64, 96)) / 8
    packed = quantize(w, mode=mode, group_size=32 if mode == "affine" else None)
    dense = dequantize(*packed, mode=mode, group_size=32 if mode == "affine" else None, dtype=jnp.float32)
    return jax.random.normal(jax.random.key(3), (23, 64)), packed, dense.mT if transpose else dense


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_experts_are_grouped_products_of_what_their_codes_stand_for(mode: str, transpose: bool) -> None:
    """Value and gradient of x, by one program for every mix of sizes; shards of the experts add up."""
    x, packed, dense = _experts(mode, transpose=transpose)
    options = {"mode": mode, "group_size": 32, "transpose": transpose}

    @jax.jit
    def ours(x: Any, sizes: Any, offset: Any = None, held: Any = packed) -> Any:
        run = lambda x: ejkernel.quantized_matmul(x, *held, group_sizes=sizes, group_offset=offset, **options)
        out, pull = jax.vjp(run, x)
        return out, *pull(jnp.cos(out))

    def wanted(x: Any, sizes: Any) -> Any:
        out, pull = jax.vjp(lambda x: ejkernel.grouped_matmul(x, dense, sizes), x)
        return out, *pull(jnp.cos(out))

    for sizes in ([5, 0, 11, 7], [0, 0, 0, 23], [1, 2, 3, 4], [0, 0, 0, 0]):
        sizes = jnp.array(sizes)
        hidden = x.at[sizes.sum() :].set(jnp.nan)
        for got, like in zip(ours(hidden, sizes), wanted(x, sizes), strict=True):
            np.testing.assert_allclose(got, like, atol=2e-5)
        shards = [ours(hidden, sizes, first, tuple(one[first : first + 2] for one in packed)) for first in (0, 2)]
        for parts, like in zip(zip(*shards, strict=True), wanted(x, sizes), strict=True):
            np.testing.assert_allclose(sum(parts), like, atol=2e-5)
    assert ours._cache_size() == 2


def test_experts_are_never_all_unpacked() -> None:
    """The temporaries of value and gradient stay below a quarter of the unpacked weights."""
    packed = quantize(jnp.zeros((32, 512, 1024)))
    run = lambda x, sizes: jnp.sum(jnp.sin(ejkernel.quantized_matmul(x, *packed, group_sizes=sizes, platform="xla")))
    program = jax.jit(jax.value_and_grad(run)).lower(jnp.ones((64, 512)), jnp.full(32, 2)).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 32 * 512 * 1024 * 4 / 4


def test_sizes_that_are_no_sizes() -> None:
    x, packed, _ = _experts("mxfp4", transpose=False)
    for sizes in ([20, 0, 4, 0], [-1, 0, 4, 0]):
        with pytest.raises(ValueError, match=r"group_sizes: got .* expected values >= 0 with a sum of at most 23 = rows of x"):
            ejkernel.quantized_matmul(x, *packed, mode="mxfp4", group_sizes=np.array(sizes))


def test_hints_change_nothing_and_are_checked() -> None:
    x, *packed = _drawn("affine", 4, False, 32)
    run = lambda **hints: ejkernel.quantized_matmul(x, *packed, group_size=32, **hints)
    expected = run()
    for hints in (
        {"fuse": False},
        {"use_best_config": True, "allow_dense_fallback": True, "strict_fuse": False},
        {"strict_fuse": True, "tpu_path": "predecode"},
    ):
        np.testing.assert_array_equal(run(**hints), expected)
    with pytest.raises(TypeError, match="fuse: got 1, expected a bool"):
        run(fuse=1)
    with pytest.raises(TypeError, match="strict_fuse: got 'no', expected a bool or None"):
        run(strict_fuse="no")
    with pytest.raises(ValueError, match="strict_fuse: got True, expected not True together with allow_dense_fallback=True"):
        run(strict_fuse=True, allow_dense_fallback=True)
    with pytest.raises(ValueError, match="tpu_path: got 'fast', expected None, 'hybrid', 'packed' or 'predecode'"):
        run(tpu_path="fast")


def test_class_form_and_second_order() -> None:
    x, *packed = _drawn("affine", 4, True, 32)
    x, packed = x[:2], [one[:3] for one in packed]
    options = {"transpose": True, "group_size": 32}
    np.testing.assert_array_equal(
        ejkernel.QuantizedMatmul()(x, *packed, **options), ejkernel.quantized_matmul(x, *packed, **options)
    )
    check_second_order(
        lambda x, scales: ejkernel.quantized_matmul(
            x[:, None].repeat(32, 1).reshape(2, 160), packed[0], scales, packed[2], **options
        ),
        lambda x, scales: x[:, None].repeat(32, 1).reshape(2, 160) @ dequantize(packed[0], scales, packed[2], group_size=32).T,
        x[:, :5],
        packed[1],
    )


def test_rows_of_a_batch_are_one_product_under_vmap() -> None:
    x, *packed = _drawn("nf4", None, False, 32)
    batch = jnp.stack([x, 2 * x, -x])
    run = jax.jit(jax.vmap(lambda x: ejkernel.quantized_matmul(x, *packed, mode="nf4", group_size=32, platform="xla")))
    np.testing.assert_allclose(run(batch)[1], 2 * run(batch)[0], rtol=1e-5, atol=1e-5)
    assert "f32[21,96]" in run.lower(batch).compile().as_text().replace("{1,0}", "")


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("leading", [(), (2, 3), (2, 0), (1, 2, 3)])
def test_any_number_of_leading_axes(leading, transpose):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*leading, 64)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((32, 64) if transpose else (64, 32)), jnp.float32)
    packed = prepack_quantized_weights(w, 32, 4, "affine")

    def loss(x, flat):
        rows = x.reshape(-1, 64) if flat else x
        out = ejkernel.quantized_matmul(rows, *packed, group_size=32, transpose=transpose)
        return jnp.sum(jnp.sin(out)), out

    (_, got), d_got = jax.value_and_grad(loss, has_aux=True)(x, False)
    (_, wanted), d_wanted = jax.value_and_grad(loss, has_aux=True)(x, True)
    assert got.shape == (*leading, 32) and d_got.shape == x.shape
    np.testing.assert_array_equal(got, wanted.reshape(got.shape))
    np.testing.assert_allclose(d_got, d_wanted, rtol=1e-6)
