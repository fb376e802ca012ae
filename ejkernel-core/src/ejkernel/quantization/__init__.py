"""Weights of a few bits: packing, formats, and the way there and back."""

from __future__ import annotations

from ejkernel.quantization._packing import pack_codes, unpack_codes
from ejkernel.quantization._weights import dequantize, prepack_quantized_weights, quantize
from ejkernel.quantization.format import MODES, QuantizationFormat, resolve_format

__all__ = [
    "MODES",
    "QuantizationFormat",
    "dequantize",
    "pack_codes",
    "prepack_quantized_weights",
    "quantize",
    "resolve_format",
    "unpack_codes",
]
