"""Root-mean-square normalisation: the arrays as the library's handlers take them.

Parameters travel in float32, `[0, d]` when absent. In backward every block writes one partial sum of the parameters' gradients, and
a second launch adds them up in a fixed order, without atomics.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel_cuda._library import handler
from ejkernel_cuda.rms_norm.config import BackwardConfig, ForwardConfig

_FLOAT = jnp.float32


def _parameter(value: Any, width: int) -> Any:
    return jnp.zeros((0, width), _FLOAT) if value is None else value.astype(_FLOAT)


def _batched(x: Any) -> tuple[int, int, int]:
    """[batch, rows, width] of `[b, ..., d]`."""
    return x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: ForwardConfig) -> RmsNormOutputs:
    x, scale, offset = inputs
    if not x.size:
        rstd = jnp.full(x.shape[:-1], call.epsilon**-0.5 if call.epsilon else jnp.inf, _FLOAT)
        return RmsNormOutputs(x, rstd if call.save_residuals else None)
    batch, rows, width = shape = _batched(x)
    out, rstd = jax.ffi.ffi_call(
        handler("rms_norm_forward"),
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct((batch * rows if call.save_residuals else 0,), _FLOAT),
        ),
    )(
        x.reshape(shape),
        _parameter(scale, width),
        _parameter(offset, width),
        epsilon=np.float32(call.epsilon),
        scale_offset=np.float32(call.scale_offset),
        threads=np.int64(config.threads),
    )
    return RmsNormOutputs(out.reshape(x.shape), rstd.reshape(x.shape[:-1]) if call.save_residuals else None)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: BackwardConfig
) -> RmsNormInputs:
    x, scale, offset = inputs
    if not x.size:
        return RmsNormInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs))
    batch, rows, width = shape = _batched(x)
    groups = batch if any(value is not None and value.shape[0] > 1 for value in (scale, offset)) else 1
    parts = max(1, min(-(-config.parts // groups), batch * rows // groups))
    if scale is None and offset is None:
        parts = min(batch * rows, 8 * config.parts)
    totals = [(0 if value is None else value.shape[0], width) for value in (scale, offset)]
    partials = [(0 if value is None else groups, parts, width) for value in (scale, offset)]
    d_x, d_scale, d_offset, *_ = jax.ffi.ffi_call(
        handler("rms_norm_backward"),
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            *(jax.ShapeDtypeStruct(dims, _FLOAT) for dims in (*totals, *partials)),
        ),
    )(
        x.reshape(shape),
        _parameter(scale, width),
        outputs.rstd.reshape(batch * rows),
        cotangents.out.reshape(shape),
        scale_offset=np.float32(call.scale_offset),
        threads=np.int64(config.threads),
        parts=np.int64(parts),
    )
    return RmsNormInputs(
        d_x.reshape(x.shape),
        None if scale is None else d_scale.astype(scale.dtype),
        None if offset is None else d_offset.astype(offset.dtype),
    )
