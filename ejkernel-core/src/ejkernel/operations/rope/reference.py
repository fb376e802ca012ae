"""`rope` in NumPy float64."""

from __future__ import annotations

from ejkernel.operations.common.rotary.reference import rotate, rotation_gradients
from ejkernel.operations.rope.interface import RopeCall, RopeInputs, RopeOutputs


def forward(call: RopeCall, inputs: RopeInputs) -> RopeOutputs:
    query, key, cos, sin = inputs
    return RopeOutputs(rotate(call, query, cos, sin), None if key is None else rotate(call, key, cos, sin))


def backward(call: RopeCall, inputs: RopeInputs, outputs: RopeOutputs, cotangents: RopeOutputs) -> RopeInputs:
    query, key, cos, sin = inputs
    d_query, d_cos, d_sin = rotation_gradients(call, query, cos, sin, cotangents.query)
    d_key = None
    if key is not None:
        d_key, more_cos, more_sin = rotation_gradients(call, key, cos, sin, cotangents.key)
        d_cos, d_sin = d_cos + more_cos, d_sin + more_sin
    return RopeInputs(d_query, d_key, d_cos, d_sin)
