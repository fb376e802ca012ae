"""`quantize`, `dequantize` and `prepack_quantized_weights`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import invalid, wrong_type
from ejkernel.quantization._packing import pack_codes
from ejkernel.quantization.codes import E2M1_MAX, E4M3_MAX, E8M0_BIAS, decode_scales, decode_weights, encode, encode_e4m3
from ejkernel.quantization.format import QuantizationFormat, resolve_format
from ejkernel.utils.checks import check_array, check_compute
from ejkernel.utils.dtypes import accumulator

AXES = ("col", "row")
_SMALLEST_E4M3 = 2.0**-9
_LARGEST_E4M3 = 0x7E
"""The code of 448."""


def quantize(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    axis: str = "col",
) -> tuple[jax.Array, ...]:
    """Round weights to codes of a few bits with one scale per group: `w = scale * value(code)`, or `scale * (code - zero)`.

    Args:
        w: `[..., rows, columns]`, finite, float32, bfloat16 or float16. Groups are consecutive weights of the grouped axis.
        group_size: weights per group; it must divide the grouped axis. None: 64 for affine and nf4, 32 for mx, 16 for nv.
        bits: 2 to 8 for affine (None: 4); the other modes have their own.
        mode: "affine", "nf4", "mxfp4", "mxfp8", "nvfp4" or "nvfp8".
        axis: "col": groups run along the columns, the last axis, and everything stays in place. "row": groups run along the
            rows; the last two axes are swapped first, and `dequantize(axis="row")` swaps them back.

    Returns:
        `(packed, scales, zeros)` for affine, else `(packed, scales)`. packed: uint32 `[..., rows, columns * bits / 32]`, a
        little-endian stream of codes per row, rounded up to whole words. scales, zeros: `[..., rows, columns / group_size]`,
        in the dtype of w for affine and nf4; uint8 for mx (E8M0) and nv (E4M3).

    Raises:
        ValueError: the group size does not divide the axis, or a value is not one of these.
        TypeError: a dtype or type does not fit.

    Source: OCP Microscaling Formats Specification 1.0, 2023; Dettmers et al., QLoRA, 2023; packing as in MLX.
    """
    form = resolve_format(mode, group_size, bits)
    check_compute("w", w)
    _check_axis(axis, w.ndim)
    grouped = w.shape[-2 if axis == "row" else -1]
    if grouped % form.group_size:
        raise invalid(
            "group_size",
            form.group_size,
            f"a divisor of {grouped}, the {'second to last' if axis == 'row' else 'last'} axis of w of shape {tuple(w.shape)}",
            remedy=f"choose another group size, or pad w with zeros by {-grouped % form.group_size}",
        )
    return _quantize(w, form, axis)


def dequantize(
    wq: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    axis: str = "col",
    dtype: Any = None,
) -> jax.Array:
    """The weights that codes stand for: `scale * value(code)`, or `scale * (code - zero)` for affine.

    Args:
        wq: packed codes of `quantize`, uint32 `[..., rows, words]`.
        scales: `[..., rows, groups]` of `quantize`.
        zeros: `[..., rows, groups]` for affine, else None.
        group_size: as for `quantize`.
        bits: as for `quantize`.
        mode: as for `quantize`.
        axis: as for `quantize`.
        dtype: of the result; None = that of scales for affine and nf4, else float32. Computed in float32.

    Returns:
        `[..., rows, groups * group_size]`, or with the last two axes swapped for axis="row". Differentiable in floating scales
        and zeros.

    Raises:
        ValueError: shapes do not belong together, or a value is not one of these.
        TypeError: a dtype or type does not fit.
    """
    form = resolve_format(mode, group_size, bits)
    check_packed(wq, scales, zeros, form)
    _check_axis(axis, wq.ndim)
    if dtype is None:
        dtype = scales.dtype if form.float_scales else jnp.float32
    return _dequantize(wq, scales, zeros, form, axis, jnp.dtype(dtype))


def prepack_quantized_weights(
    w: jax.Array,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    transpose: bool = False,
) -> tuple[jax.Array, ...]:
    """Quantize a matrix once, in the layout that `quantized_matmul` reads; under `jit`, all but w are static.

    Args:
        w: `[..., rows, columns]`. With rows = K and columns = N, the result is for `quantized_matmul(transpose=False)`; with
            rows = N and columns = K, for `quantized_matmul(transpose=True)`.
        group_size: as for `quantize`.
        bits: as for `quantize`.
        mode: as for `quantize`.
        transpose: swap the last two axes of w first, as `quantize(axis="row")` does.

    Returns:
        As `quantize`; groups run along the last axis of what is stored.

    Raises:
        ValueError: the group size does not divide the grouped axis, or a value is not one of these.
        TypeError: a dtype or type does not fit.
    """
    if not isinstance(transpose, bool):
        raise wrong_type("transpose", repr(transpose), "a bool")
    return quantize(w, group_size, bits, mode, "row" if transpose else "col")


def check_packed(wq: Any, scales: Any, zeros: Any, form: QuantizationFormat, name: str = "wq") -> None:
    """Refuse packed weights, called `name`, whose parts do not belong together."""
    check_array(name, wq, floating=False)
    check_array("scales", scales, floating=False)
    if wq.dtype != jnp.uint32:
        raise wrong_type(name, f"dtype {wq.dtype}", "uint32, as quantize returns it")
    if form.float_scales:
        check_compute("scales", scales)
    elif scales.dtype != jnp.uint8:
        kind = "E8M0" if form.mode.startswith("mx") else "E4M3"
        raise wrong_type("scales", f"dtype {scales.dtype}", f"uint8, the {kind} codes of mode {form.mode!r}")
    if wq.ndim < 1 or wq.ndim != scales.ndim or wq.shape[:-1] != scales.shape[:-1]:
        raise invalid(
            "scales", f"shape {tuple(scales.shape)}", f"all but the last axis as in {name} of shape {tuple(wq.shape)}"
        )
    count = scales.shape[-1] * form.group_size
    if wq.shape[-1] != form.words(count):
        raise invalid(
            name,
            f"{wq.shape[-1]} words per row",
            f"{form.words(count)} for {scales.shape[-1]} groups of {form.group_size} codes of {form.bits} bits",
            remedy="give mode=, group_size= and bits= as quantize got them",
        )
    if (zeros is not None) != form.has_zeros:
        expected = "an array for mode 'affine'" if form.has_zeros else f"None for mode {form.mode!r}, which has no zero points"
        raise wrong_type("zeros", "None" if zeros is None else "an array", expected)
    if zeros is not None:
        check_compute("zeros", zeros)
        if zeros.shape != scales.shape:
            raise invalid("zeros", f"shape {tuple(zeros.shape)}", f"{tuple(scales.shape)} as scales")


def _check_axis(axis: str, ndim: int) -> None:
    if axis not in AXES:
        raise invalid("axis", repr(axis), "'col' (groups along the last axis) or 'row' (along the one before)")
    if ndim < (2 if axis == "row" else 1):
        raise invalid("w", f"{ndim} axes", f"at least {2 if axis == 'row' else 1} for axis={axis!r}")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(w: Any, form: QuantizationFormat, axis: str) -> tuple[Any, ...]:
    w = jnp.swapaxes(w, -1, -2) if axis == "row" else w
    groups = w.astype(accumulator(w.dtype)).reshape(*w.shape[:-1], -1, form.group_size)
    make = {"affine": _affine, "nf4": _nf4}.get(form.mode, _microscaled if form.mode.startswith("mx") else _nvidia)
    codes, *scales = make(groups, form, w.dtype)
    return pack_codes(codes.reshape(w.shape), form.bits), *scales


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _dequantize(wq: Any, scales: Any, zeros: Any, form: QuantizationFormat, axis: str, dtype: Any) -> Any:
    w = decode_weights(wq, scales, zeros, form, scales.shape[-1] * form.group_size).astype(dtype)
    return jnp.swapaxes(w, -1, -2) if axis == "row" else w


def _affine(groups: Any, form: QuantizationFormat, dtype: Any) -> tuple[Any, Any, Any]:
    """Scale rounded up, so that no weight falls outside the codes; a zero point that is a whole number where 0 is in range.

    The zero point is then exact in every dtype, and so is a weight 0. Where 0 is out of range, a scale finer than the dtype
    resolves the weights would only make the zero point large.
    """
    low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
    around_0 = (low <= 0) & (high >= 0)
    scale = high / (2**form.bits - 1) - low / (2**form.bits - 1)
    resolution = jnp.maximum(jnp.abs(low), jnp.abs(high)) * (0.5 * float(jnp.finfo(dtype).eps))
    stored = _rounded_up(jnp.where(around_0, scale, jnp.maximum(scale, resolution)), dtype)
    stored = jnp.where(stored > 0, stored, jnp.ones_like(stored))
    scale = stored.astype(groups.dtype)
    zero = -low / scale
    zero = jnp.where(around_0, jnp.round(zero), zero).astype(dtype)
    codes = encode(groups, scale[..., None], zero.astype(groups.dtype)[..., None], form)
    return codes, stored, zero


def _rounded_up(value: Any, dtype: Any) -> Any:
    stored = value.astype(dtype)
    return jnp.where(stored.astype(value.dtype) < value, jnp.nextafter(stored, jnp.full_like(stored, jnp.inf)), stored)


def _nf4(groups: Any, form: QuantizationFormat, dtype: Any) -> tuple[Any, Any]:
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scale = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return encode(groups, scale[..., None], None, form), scale.astype(dtype)


def _microscaled(groups: Any, form: QuantizationFormat, dtype: Any) -> tuple[Any, Any]:
    """A power of two per group.

    mxfp4: the exponent of the largest weight less that of the format, as in section 6.3 of the specification; what lies above
    6 becomes 6. mxfp8: one more where the largest weight would lie above 448; E4M3 has an exponent of its own, so this costs
    no precision.
    """
    largest = jnp.max(jnp.abs(groups), axis=-1).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits >> 23) - E8M0_BIAS
    exponent = exponent - 2 if form.bits == 4 else exponent - 8 + ((bits & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    exponent = jnp.where(largest > 0, jnp.maximum(exponent, 1 - E8M0_BIAS), 0)
    factor = jax.lax.bitcast_convert_type((E8M0_BIAS + exponent).astype(jnp.int32) << 23, jnp.float32)
    codes = encode(groups, factor.astype(groups.dtype)[..., None], None, form)
    return codes, (exponent + E8M0_BIAS).astype(jnp.uint8)


def _nvidia(groups: Any, form: QuantizationFormat, dtype: Any) -> tuple[Any, Any]:
    """The E4M3 number nearest to the largest weight over the format's largest value, not 0 unless all weights are.

    nvfp8: the next one where that lies below, so that nothing is cut off; E4M3 values lose no precision by it.
    """
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scale = jnp.maximum(largest / (E2M1_MAX if form.bits == 4 else E4M3_MAX), _SMALLEST_E4M3)
    scale = jnp.where(largest > 0, scale, jnp.ones_like(scale))
    codes = encode_e4m3(scale)
    if form.bits == 8:
        codes = jnp.where(decode_scales(codes, form, scale.dtype) < scale, jnp.minimum(codes + 1, _LARGEST_E4M3), codes)
    factor = decode_scales(codes, form, groups.dtype)
    return encode(groups, factor[..., None], None, form), codes.astype(jnp.uint8)
