"""What codes and one-byte scales stand for, and which code is nearest to a value.

E2M1, E4M3 and E8M0 are those of the OCP Microscaling Formats (MX) Specification 1.0 and of the OCP 8-bit floating point
specification; NF4 is that of Dettmers et al., QLoRA, 2023.
"""

from __future__ import annotations

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


def encode(values: Any, form: QuantizationFormat) -> Any:
    """The code nearest to every value, uint32; ties go to the even code, values out of range to the last one."""
    if form.mode == "affine":
        return jnp.clip(jnp.round(values), 0, 2**form.bits - 1).astype(jnp.uint32)
    if form.mode == "nf4":
        middles = (NF4[1:].astype(np.float64) + NF4[:-1]) / 2
        return _count_above(values, middles, np.zeros(15, bool))
    if form.bits == 8:
        return encode_e4m3(values)
    middles = (_E2M1_MAGNITUDES[1:] + _E2M1_MAGNITUDES[:-1]) / 2
    magnitude = _count_above(jnp.abs(values), middles, np.arange(1, 8) % 2 == 0)
    return magnitude | jnp.where(jnp.signbit(values), np.uint32(8), np.uint32(0))


def _count_above(values: Any, limits: np.ndarray, inclusive: np.ndarray) -> Any:
    """How many of the ascending limits a value is above; at a limit, whether it counts is `inclusive`."""
    total = jnp.zeros(values.shape, jnp.uint32)
    for limit, counts in zip(limits, inclusive, strict=True):
        limit = jnp.asarray(limit, values.dtype)
        total = total + (values >= limit if counts else values > limit).astype(jnp.uint32)
    return total


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
