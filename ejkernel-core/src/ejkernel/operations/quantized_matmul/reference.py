"""`quantized_matmul` in NumPy float64: codes are read bit by bit and looked up in tables.

With groups, the weights are those of the reference of `grouped_matmul`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.call.arrays import ArraySpec
from ejkernel.operations.grouped_matmul import reference as grouped_matmul
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs
from ejkernel.operations.quantized_matmul.interface import (
    QuantizedMatmulCall,
    QuantizedMatmulInputs,
    QuantizedMatmulOutputs,
)
from ejkernel.quantization.codes import NF4


def _codes(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of the last axis, `[..., count]`: bit i of a row is bit i % 32 of word i // 32."""
    stream = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
    stream = stream.reshape(*words.shape[:-1], 32 * words.shape[-1])[..., : count * bits]
    stream = stream.reshape(*words.shape[:-1], count, bits)
    return stream @ (1 << np.arange(bits))


def _small_float(codes: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Sign, exponent with the usual bias, mantissa; subnormal where the exponent is 0. Infinity and NaN do not occur."""
    mantissa = codes % 2**mantissa_bits
    exponent = codes // 2**mantissa_bits % 2**exponent_bits
    sign = 1 - 2.0 * (codes // 2 ** (mantissa_bits + exponent_bits))
    significand = np.where(exponent > 0, 2**mantissa_bits, 0) + mantissa
    power = np.maximum(exponent, 1) - (2 ** (exponent_bits - 1) - 1) - mantissa_bits
    return sign * significand * 2.0**power


def _values(call: QuantizedMatmulCall, words: np.ndarray) -> np.ndarray:
    codes = _codes(words, call.bits, call.packed_columns)
    if call.mode == "affine":
        return codes.astype(np.float64)
    if call.mode == "nf4":
        return NF4.astype(np.float64)[codes]
    return _small_float(codes, 2, 1) if call.bits == 4 else _small_float(codes, 4, 3)


def _factors(call: QuantizedMatmulCall, scales: np.ndarray) -> np.ndarray:
    if call.mode in ("affine", "nf4"):
        return scales
    return 2.0 ** (scales.astype(np.int64) - 127) if call.mode[:2] == "mx" else _small_float(scales.astype(np.int64), 4, 3)


def _parts(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs) -> tuple[np.ndarray, np.ndarray]:
    """`code - zero` (or the value) and scale of every weight, `[b?, *g, rows, columns]`."""
    values = _values(call, np.asarray(inputs.w))
    if inputs.zeros is not None:
        values = values - np.repeat(inputs.zeros, call.group_size, axis=-1)
    return values, np.repeat(_factors(call, np.asarray(inputs.scales)), call.group_size, axis=-1)


def _in_groups(
    call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs, weights: np.ndarray
) -> tuple[GroupedMatmulCall, GroupedMatmulInputs]:
    """The same product with weights of any numbers."""
    given = GroupedMatmulInputs(inputs.x, weights, inputs.group_sizes, inputs.group_offset)
    specs: Any = {name: ArraySpec.of(value) for name, value in given._asdict().items() if value is not None}
    options: Any = {"preferred_element_type": "float64", "transpose_rhs": call.transpose}
    return GroupedMatmulCall(**specs, **options), given


def forward(call: QuantizedMatmulCall, inputs: QuantizedMatmulInputs) -> QuantizedMatmulOutputs:
    shifted, factors = _parts(call, inputs)
    weights = shifted * factors
    if inputs.group_sizes is not None:
        return QuantizedMatmulOutputs(grouped_matmul.forward(*_in_groups(call, inputs, weights)).out)
    return QuantizedMatmulOutputs(inputs.x @ (weights.swapaxes(1, 2) if call.transpose else weights))


def backward(
    call: QuantizedMatmulCall,
    inputs: QuantizedMatmulInputs,
    outputs: QuantizedMatmulOutputs,
    cotangents: QuantizedMatmulOutputs,
) -> QuantizedMatmulInputs:
    shifted, factors = _parts(call, inputs)
    weights = shifted * factors
    grad = cotangents.out
    if inputs.group_sizes is None:
        d_x = grad @ (weights if call.transpose else weights.swapaxes(1, 2))
        d_w = grad.swapaxes(1, 2) @ inputs.x if call.transpose else inputs.x.swapaxes(1, 2) @ grad
    else:
        given = GroupedMatmulOutputs(grad)
        d_x, d_w, *_ = grouped_matmul.backward(*_in_groups(call, inputs, weights), given, given)
    if len(d_w) != len(inputs.w):
        d_w = d_w.sum(axis=0, keepdims=True)

    def per_group(values: np.ndarray) -> np.ndarray:
        return values.reshape(*inputs.scales.shape, call.group_size).sum(axis=-1)

    return QuantizedMatmulInputs(
        d_x,
        None,
        per_group(d_w * shifted) if call.form.float_scales else None,
        None if inputs.zeros is None else per_group(-d_w * factors),
    )
