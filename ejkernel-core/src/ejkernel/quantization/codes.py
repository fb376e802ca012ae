"""What codes and one-byte scales stand for, and which code is nearest to a value.

E2M1, E4M3 and E8M0 are those of the OCP Microscaling Formats (MX) Specification 1.0 and of the OCP 8-bit floating point
specification; NF4 is that of Dettmers et al., QLoRA, 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.quantization.format import QuantizationFormat
from ejkernel.utils.dtypes import accumulator

NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
"""By the low three bits of the code; the fourth is the sign."""

E2M1 = np.concatenate([_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES])
E4M3 = np.arange(256, dtype=np.uint8).view(np.dtype(jnp.float8_e4m3fn)).astype(np.float32)
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32), np.float32(np.nan))
"""Values by code, all 256; 2**-127 is below the normal floats and may be flushed to 0."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_BIAS = 127


def decode(codes: Any, form: QuantizationFormat, dtype: Any) -> Any:
    """The values of codes, before scale and zero point.

    By tables: on a CPU bit tricks for E2M1 and conversions from E4M3 took 2 to 10 times as long as a whole product with one row.
    """
    if form.mode == "affine":
        return codes.astype(dtype)
    return _look_up(NF4 if form.mode == "nf4" else E2M1 if form.bits == 4 else E4M3, codes, dtype)


def _look_up(table: np.ndarray, codes: Any, dtype: Any) -> Any:
    return jnp.asarray(table, dtype)[codes.astype(jnp.int32)]


def encode(values: Any, factor: Any, zero: Any, form: QuantizationFormat) -> Any:
    """The code that stands for the number nearest to every value under its scale, uint32.

    Ties go to the even code, values out of range to the last one. A quotient is rounded, which moves what lies next to a tie onto
    it, so values are compared with limits times the scale.

    Args:
        values: `[..., group_size]`.
        factor: the scale `[..., 1]` as it is decoded.
        zero: the zero point `[..., 1]`; None without.
    """
    if form.mode == "affine":
        codes = jnp.clip(jnp.round(values / factor + zero), 0, 2**form.bits - 1)
        return _nearest(codes, values, factor, lambda code: code + 0.5 - zero, 2**form.bits - 1)
    if form.mode == "nf4":
        middles = (NF4[1:].astype(np.float64) + NF4[:-1]) / 2
        return _count_above(values, factor, middles, np.zeros(15, bool))
    sign = jnp.signbit(values).astype(jnp.uint32) << (form.bits - 1)
    if form.bits == 4:
        middles = (_E2M1_MAGNITUDES[1:] + _E2M1_MAGNITUDES[:-1]) / 2
        return sign | _count_above(jnp.abs(values), factor, middles, np.arange(1, 8) % 2 == 0)
    middles = (E4M3[1:127] + E4M3[:126]) / 2
    codes = encode_e4m3(jnp.abs(values) / factor)
    return sign | _nearest(
        codes.astype(factor.dtype), jnp.abs(values), factor, lambda code: _look_up(middles, code, factor.dtype), 126
    )


def _nearest(codes: Any, values: Any, factor: Any, limit_above: Callable[[Any], Any], last: int) -> Any:
    """Codes that a rounded quotient may have moved by one, put right; `limit_above(code)` is halfway to the next one's value."""
    below = (codes > 0) & (_difference(values, limit_above(jnp.maximum(codes - 1, 0)), factor) < 0)
    above = (codes < last) & (_difference(values, limit_above(jnp.minimum(codes, last - 1)), factor) > 0)
    return (codes - below.astype(codes.dtype) + above.astype(codes.dtype)).astype(jnp.uint32)


def _count_above(values: Any, factor: Any, limits: np.ndarray, inclusive: np.ndarray) -> Any:
    """How many of the ascending limits, times the factor, a value is above; at a limit, whether it counts is `inclusive`."""
    total = jnp.zeros(values.shape, jnp.uint32)
    for limit, counts in zip(limits, inclusive, strict=True):
        high = np.float32(limit)
        difference = _difference(values, jnp.asarray(high, values.dtype), factor, float(limit) - float(high))
        total = total + (difference >= 0 if counts else difference > 0).astype(jnp.uint32)
    return total


def _difference(values: Any, limit: Any, factor: Any, rest: float = 0.0) -> Any:
    """`values - (limit + rest) * factor` with the right sign where they are close: in two parts, whose products are exact."""
    if factor.dtype != jnp.float32:
        return values - (limit + rest) * factor
    (limit, low), (factor, fine) = _parts(limit), _parts(factor)
    low = low + jnp.float32(rest)
    return (values - limit * factor) - (limit * fine + low * factor + low * fine)


def _parts(values: Any) -> tuple[Any, Any]:
    """A float32 as the sum of two numbers of 12 bits. The second loses nothing by `reduce_precision`, which keeps compilers from
    multiplying the sum in place of the two."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    high = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFFF000), jnp.float32)
    return high, jax.lax.reduce_precision(values - high, 8, 22)


def encode_e4m3(values: Any) -> Any:
    """uint32 codes; magnitudes above 448 become 448."""
    small = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(small, jnp.uint8).astype(jnp.uint32)


def decode_scales(scales: Any, form: QuantizationFormat, dtype: Any) -> Any:
    """The factors that scales stand for."""
    if form.float_scales:
        return scales.astype(dtype)
    return _look_up(E4M3 if form.mode.startswith("nv") else E8M0, scales, dtype)


def decode_weights(words: Any, scales: Any, zeros: Any, form: QuantizationFormat, count: int) -> Any:
    """`scale * (value - zero)` of `count` packed weights along the last axis, in float32 (float64 if scales are)."""
    values, factors, zeros = decode_parts(words, scales, zeros, form, count)
    values = values if zeros is None else values - zeros[..., None]
    return (values * factors[..., None]).reshape(*words.shape[:-1], count)


def decode_parts(words: Any, scales: Any, zeros: Any, form: QuantizationFormat, count: int) -> tuple[Any, Any, Any]:
    """Values `[..., groups, group_size]`, factors and zero points `[..., groups]` (or None)."""
    from ejkernel.quantization._packing import unpack_codes

    dtype = accumulator(scales.dtype) if form.float_scales else jnp.float32
    codes = unpack_codes(words, form.bits, count)
    values = decode(codes, form, dtype).reshape(*words.shape[:-1], -1, form.group_size)
    return values, decode_scales(scales, form, dtype), None if zeros is None else zeros.astype(dtype)
