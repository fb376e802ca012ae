"""Root-mean-square normalisation of heads and their rotation, in float32 inside; XLA fuses both into one pass over each array."""

from __future__ import annotations

from typing import Any

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall, QkNormRopeInputs, QkNormRopeOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._rotary import rotate, rotation_gradients
from ejkernel_xla._rows import normalise, parameter_gradient, rms_gradient, scaled


def forward(call: QkNormRopeCall, inputs: QkNormRopeInputs, config: None) -> QkNormRopeOutputs:
    def one(x: Any, scale: Any) -> tuple[Any, Any]:
        normalised, rstd = normalise(x, call.epsilon)
        turned = rotate(call, scaled(normalised, scale, call.scale_offset), inputs.cos, inputs.sin)
        return turned.astype(x.dtype), rstd[..., 0] if call.save_residuals else None

    (query, query_rstd), (key, key_rstd) = one(inputs.query, inputs.query_scale), one(inputs.key, inputs.key_scale)
    return QkNormRopeOutputs(query, key, query_rstd, key_rstd)


def backward(
    call: QkNormRopeCall,
    inputs: QkNormRopeInputs,
    outputs: QkNormRopeOutputs,
    cotangents: QkNormRopeOutputs,
    config: None,
) -> QkNormRopeInputs:
    cos, sin = inputs.cos, inputs.sin

    def one(x: Any, scale: Any, rstd: Any, grad: Any) -> tuple[Any, Any, Any, Any]:
        wide, rstd = accumulator(x.dtype), rstd[..., None]
        normalised = x.astype(wide) * rstd
        turned_back, d_cos, d_sin = rotation_gradients(
            call, scaled(normalised, scale, call.scale_offset), cos, sin, grad.astype(wide)
        )
        d_x = rms_gradient(normalised, rstd, scaled(turned_back, scale, call.scale_offset))
        return d_x.astype(x.dtype), d_cos, d_sin, parameter_gradient(scale, turned_back * normalised)

    d_query, *of_query, d_query_scale = one(inputs.query, inputs.query_scale, outputs.query_rstd, cotangents.query)
    d_key, *of_key, d_key_scale = one(inputs.key, inputs.key_scale, outputs.key_rstd, cotangents.key)
    d_cos, d_sin = (first + second for first, second in zip(of_query, of_key, strict=True))
    return QkNormRopeInputs(d_query, d_key, d_cos.astype(cos.dtype), d_sin.astype(sin.dtype), d_query_scale, d_key_scale)
