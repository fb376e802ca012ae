"""Formats of a few bits: packing is exact, errors stay within each format's bound, and what cannot be is refused."""

from __future__ import annotations

import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.quantization import MODES, dequantize, pack_codes, prepack_quantized_weights, quantize, unpack_codes
from ejkernel.quantization.codes import E2M1, E4M3, E8M0, NF4

FORMATS = [("affine", bits) for bits in range(2, 9)] + [(mode, None) for mode in MODES[1:]]
formats = pytest.mark.parametrize(("mode", "bits"), FORMATS)


def weights(rows: int = 24, columns: int = 256, scale: float = 0.05, seed: int = 0) -> np.ndarray:
    """Normal rows, and some that are hard: far from 0, constant, all 0, of one sign, with one large weight."""
    w = np.random.default_rng(seed).standard_normal((rows, columns)) * scale
    w[0] += 3
    w[1] = 5
    w[2] = 0
    w[3] = np.abs(w[3])
    w[4, 7] = -40
    w[5] *= 1e-6
    return w.astype(np.float32)


def restored(w: Any, mode: str, bits: int | None, **more: Any) -> np.ndarray:
    return np.asarray(dequantize(*quantize(w, mode=mode, bits=bits, **more), mode=mode, bits=bits, dtype=jnp.float32, **more))


@pytest.mark.parametrize("bits", [*range(1, 9), 12, 17, 32])
def test_packing_is_a_little_endian_stream(bits: int) -> None:
    """Against Python's integers, for rows that end inside a word too."""
    rng = np.random.default_rng(bits)
    for count in (0, 5, 33, 96):
        codes = rng.integers(0, 2**bits, (2, count), dtype=np.uint64).astype(np.uint32)
        packed = np.asarray(pack_codes(jnp.asarray(codes), bits))
        for row, words in zip(codes, packed, strict=True):
            stream = sum(int(code) << (index * bits) for index, code in enumerate(row))
            assert [int(word) for word in words] == [stream >> 32 * k & 0xFFFFFFFF for k in range(-(-count * bits // 32))]
        np.testing.assert_array_equal(unpack_codes(jnp.asarray(packed), bits, count), codes)


def test_tables() -> None:
    np.testing.assert_array_equal(E2M1[:8], [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(E2M1[8:], -E2M1[:8])
    assert (E4M3[0x7E], E4M3[1], E4M3[0x38], E4M3[0xB8]) == (448, 2.0**-9, 1, -1)
    assert (E8M0[127], E8M0[254], E8M0[1]) == (1, 2.0**127, 2.0**-126) and np.isnan(E8M0[255])


def test_nf4_is_made_of_quantiles_of_the_normal_distribution() -> None:
    inverse = statistics.NormalDist().inv_cdf
    positive = [inverse(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    negative = [-inverse(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    expected = np.array(sorted([*positive, *negative, 0.0])) / max(positive)
    np.testing.assert_allclose(NF4, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_affine_errs_by_half_a_step(bits: int, dtype: str) -> None:
    w = jnp.asarray(weights(), dtype)
    packed, scales, zeros = quantize(w, bits=bits, group_size=32)
    assert packed.shape == (24, 8 * bits) and scales.dtype == zeros.dtype == w.dtype
    exact = np.asarray(w, np.float32)
    error = np.abs(restored(w, "affine", bits, group_size=32) - exact)
    step = np.repeat(np.asarray(scales, np.float32), 32, axis=1)
    assert (error <= 0.5 * step * (1 + 1e-5) + float(jnp.finfo(dtype).eps) * np.abs(exact)).all()
    assert (step[6:] <= 1.02 * np.repeat(np.ptp(exact[6:].reshape(18, 8, 32), axis=2), 32, axis=1) / (2**bits - 1)).all()
    np.testing.assert_array_equal(error[1:3], 0)
    np.testing.assert_array_equal(np.asarray(zeros, np.float32)[6:] % 1, 0)  # so that a weight 0 stays 0


def test_nf4_errs_by_half_the_gap_between_quantiles() -> None:
    w = weights()
    _, scales = quantize(w, mode="nf4", group_size=32)
    scales = np.repeat(np.asarray(scales), 32, axis=1)
    found = restored(w, "nf4", None, group_size=32)
    candidates = NF4[:, None, None] * np.where(scales == 0, 1, scales)
    best = np.abs(candidates - w).min(axis=0)
    np.testing.assert_allclose(np.abs(found - w), best, atol=1e-6 * scales.max())
    np.testing.assert_array_equal(
        np.abs(w).reshape(24, 8, 32).max(axis=2), np.asarray(scales)[:, ::32] * (w.any(axis=1)[:, None])
    )


@pytest.mark.parametrize(("mode", "group", "largest"), [("mxfp4", 32, 6.0), ("mxfp8", 32, 448.0)])
def test_mx_scales_are_the_powers_of_two_of_the_specification(mode: str, group: int, largest: float) -> None:
    w = weights(seed=1)
    _, scales = quantize(w, mode=mode)
    exponent = np.asarray(scales).astype(int) - 127
    amax = np.abs(w).reshape(24, -1, group).max(axis=2)
    used = amax > 0
    if mode == "mxfp4":
        np.testing.assert_array_equal(exponent[used], np.floor(np.log2(amax[used])) - 2)
    else:
        np.testing.assert_array_equal(exponent[used], np.ceil(np.log2(amax[used].astype(np.float64) / 448)))
    step = np.repeat(2.0**exponent, group, axis=1)
    check_nearest(restored(w, mode, None), w, step, E2M1 if mode == "mxfp4" else E4M3)


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp8"])
def test_nv_scales_are_e4m3(mode: str) -> None:
    w = weights(seed=2)
    _, scales = quantize(w, mode=mode)
    factor = E4M3[np.asarray(scales)]
    wanted = np.abs(w).reshape(24, -1, 16).max(axis=2) / (6 if mode == "nvfp4" else 448)
    normal = wanted >= 2.0**-6
    assert normal.any() and (factor > 0).all()
    assert (np.abs(factor - wanted)[normal] <= (1 / 16 if mode == "nvfp4" else 1 / 8) * wanted[normal]).all()
    assert (np.abs(factor - wanted)[~normal & (wanted > 0)] <= 2.0**-9).all()
    if mode == "nvfp8":
        assert (factor[wanted > 0] >= wanted[wanted > 0] * (1 - 1e-6)).all()
    check_nearest(restored(w, mode, None), w, np.repeat(factor, 16, axis=1), E2M1 if mode == "nvfp4" else E4M3)


def check_nearest(found: np.ndarray, w: np.ndarray, factor: np.ndarray, table: np.ndarray) -> None:
    """Every weight became the value of the format that is nearest to it under its scale."""
    values = np.unique(table[np.isfinite(table)].astype(np.float64))
    best = np.abs(values[:, None] - (w / factor).ravel()).min(axis=0).reshape(w.shape)
    np.testing.assert_allclose(np.abs(found - w) / factor, best, atol=1e-5)


@formats
def test_quantizing_twice_changes_nothing(mode: str, bits: int | None) -> None:
    """Exactly, but for affine, whose scale and zero point are formed anew: there within rounding."""
    once = restored(weights()[6:], mode, bits)
    twice = restored(once, mode, bits)
    np.testing.assert_allclose(twice, once, rtol=0, atol=1e-6 * np.abs(once).max() if mode == "affine" else 0)


@formats
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 128)])
def test_leading_axes_and_jit(mode: str, bits: int | None, shape: tuple[int, ...]) -> None:
    w = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    pack = jax.jit(prepack_quantized_weights, static_argnames=["group_size", "bits", "mode", "transpose"])
    traced = pack(w, bits=bits, mode=mode)
    parts = quantize(w, bits=bits, mode=mode)
    assert len(parts) == (3 if mode == "affine" else 2)
    for one, other in zip(traced, parts, strict=True):
        np.testing.assert_array_equal(one, other)
    found = dequantize(*parts, bits=bits, mode=mode)
    assert found.shape == shape and found.dtype == jnp.float32
    assert float(jnp.abs(found - w).max()) <= {2: 1.3, 3: 0.6}.get(bits, 1.0 if mode == "mxfp4" else 0.5)


@formats
def test_rows_are_columns_of_the_transpose(mode: str, bits: int | None) -> None:
    w = weights(64, 128)
    quant = functools.partial(quantize, mode=mode, bits=bits)
    for one, other, packed in zip(
        quant(w, axis="row"), quant(w.T.copy()), prepack_quantized_weights(w, mode=mode, bits=bits, transpose=True), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, packed)
    np.testing.assert_array_equal(restored(w, mode, bits, axis="row"), restored(w.T.copy(), mode, bits).T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extreme_affine_weights(dtype: str) -> None:
    top, eps = float(jnp.finfo(dtype).max) / 16, float(jnp.finfo(dtype).eps)
    w = jnp.asarray(np.stack([np.linspace(-1, 1, 64) * top, np.full(64, top), np.linspace(0, 1, 64) * 1e-7]), dtype)
    exact = np.asarray(w, np.float64)
    for bits in (2, 8):
        found = np.asarray(dequantize(*quantize(w, bits=bits), bits=bits, dtype=jnp.float32), np.float64)
        allowed = 0.5 * (1 + 2 * eps) * np.ptp(exact, axis=1) / (2**bits - 1) + eps * np.abs(exact).max(axis=1) + 1e-7
        assert (np.abs(found - exact).max(axis=1) <= allowed).all()


@pytest.mark.parametrize("mode", ["nf4", "mxfp4", "mxfp8"])
def test_extreme_weights_of_wide_formats(mode: str) -> None:
    w = np.linspace(-1, 1, 64, dtype=np.float32)[None] * np.float32(1e37)
    assert np.abs(restored(w, mode, None) - w).max() <= 0.26 * 1e37


def test_dequantize_is_differentiable_in_scales_and_zeros() -> None:
    packed, scales, zeros = quantize(weights(8, 64), bits=4, group_size=32)
    total = lambda scales, zeros: jnp.sum(jnp.sin(dequantize(packed, scales, zeros, bits=4, group_size=32)))
    d_scales, d_zeros = jax.grad(total, argnums=(0, 1))(scales, zeros)
    codes = np.asarray(unpack_codes(packed, 4, 64), np.float64).reshape(8, 2, 32) - np.asarray(zeros)[..., None]
    slope = np.cos(codes * np.asarray(scales)[..., None])
    np.testing.assert_allclose(d_scales, (slope * codes).sum(axis=2), rtol=1e-4)
    np.testing.assert_allclose(d_zeros, -(slope * np.asarray(scales)[..., None]).sum(axis=2), rtol=1e-4)


W = np.ones((4, 96), np.float32)
PACKED = quantize(W, group_size=32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(W), ValueError, r"group_size: got 64, expected a divisor of 96, the last axis .* by 32"),
        (lambda: quantize(W, axis="row", group_size=3), ValueError, "a divisor of 4, the second to last axis"),
        (lambda: quantize(W, bits=9), ValueError, "bits: got 9, expected 2 to 8"),
        (lambda: quantize(W, mode="nf4", bits=3), ValueError, "bits: got 3, expected 4 or None for mode 'nf4'"),
        (
            lambda: quantize(W, mode="mxfp4", group_size=16),
            ValueError,
            "group_size: got 16, expected 32 or None for mode 'mxfp4'",
        ),
        (lambda: quantize(W, mode="afine"), ValueError, "did you mean 'affine'"),
        (lambda: quantize(W, group_size=32.0), TypeError, "group_size: got 32.0, expected an int or None"),
        (lambda: quantize(W, group_size=0), ValueError, "group_size: got 0, expected a value >= 1"),
        (lambda: quantize(W.astype(np.int32), group_size=32), TypeError, "w: got dtype int32"),
        (lambda: quantize(W, group_size=32, axis="x"), ValueError, "axis: got 'x'"),
        (lambda: quantize(W[0], group_size=32, axis="row"), ValueError, "w: got 1 axes, expected at least 2"),
        (lambda: prepack_quantized_weights(W, group_size=32, transpose=1), TypeError, "transpose: got 1, expected a bool"),
        (lambda: dequantize(*PACKED[:2], group_size=32), TypeError, "zeros: got None, expected an array for mode 'affine'"),
        (lambda: dequantize(*PACKED, group_size=32, mode="nf4"), TypeError, "zeros: got an array, expected None"),
        (lambda: dequantize(*PACKED, group_size=16), ValueError, "wq: got 12 words per row, expected 6 for 3 groups of 16"),
        (lambda: dequantize(PACKED[0].astype(jnp.int32), *PACKED[1:], group_size=32), TypeError, "wq: got dtype int32"),
        (lambda: dequantize(PACKED[0], PACKED[1][:2], PACKED[2][:2], group_size=32), ValueError, r"scales: got shape \(2, 3\)"),
        (lambda: dequantize(*PACKED[:2], PACKED[2][:, :2], group_size=32), ValueError, r"zeros: got shape \(4, 2\)"),
        (lambda: dequantize(*PACKED[:2], mode="mxfp4"), TypeError, "scales: got dtype float32, expected uint8, the E8M0 codes"),
        (lambda: pack_codes(jnp.ones((2, 2)), 3), ValueError, "codes: got dtype float32, expected integers"),
        (lambda: unpack_codes(PACKED[0], 4, 8), ValueError, "words: got 12 words, expected 1 = ceil"),
        (lambda: unpack_codes(PACKED[0], 33, 8), ValueError, "bits: got 33, expected 1 to 32"),
    ],
)
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("mode", ["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"])
def test_values_beside_a_tie_become_the_nearer_code(mode: str) -> None:
    """One float32 step from halfway between two values, on either side."""
    rng, group = np.random.default_rng(4), {"affine": 64, "nf4": 64}.get(mode, 32 if mode.startswith("mx") else 16)
    w = np.zeros((60, group), np.float32)
    w[:, 0] = rng.uniform(0.01, 3, 60)
    w[:, 1] = 0 if mode != "affine" else -w[:, 0] * rng.uniform(0.2, 1, 60)
    table = {"nf4": NF4, "mxfp4": E2M1, "nvfp4": E2M1}.get(mode, E4M3[np.isfinite(E4M3)])
    values = np.unique(table.astype(np.float64)) * np.ones((60, 1))
    scale, *zero = (np.asarray(part[:, :1], np.float64) for part in quantize(jnp.asarray(w), mode=mode)[1:])
    if mode == "affine":
        values = np.arange(16) - zero[0]
    elif mode != "nf4":
        scale = E4M3[scale.astype(int)].astype(np.float64) if mode.startswith("nv") else 2.0 ** (scale - 127)
    values = values * scale
    middles = (values[:, 1:] + values[:, :-1]) / 2
    for row, places in enumerate(middles):
        inside = places[
            (places > min(-0.9 * w[row, 0], 0) if mode != "affine" else places > w[row, 1]) & (places < 0.9 * w[row, 0])
        ]
        w[row, 2:] = rng.choice(inside, group - 2)
    w[::2, 2:] = np.nextafter(w[::2, 2:], np.float32(0))
    w[1::2, 2:] = np.nextafter(w[1::2, 2:], np.float32(9))
    found = restored(w, mode, None)
    chosen = np.take_along_axis(values, np.abs(found[:, :, None] - values[:, None]).argmin(axis=2), axis=1)
    distances = np.abs(w.astype(np.float64)[:, :, None] - values[:, None]).min(axis=2)
    assert (np.abs(w - chosen) <= distances).all()
