"""Normalisations of rows: the arrays as the library's handlers take them.

Parameters are passed in the dtype of x if all of them have it, else in float32; `[0, d]` when absent. In backward every block
writes one partial sum of the parameters' gradients, and a second kernel reduces them in a fixed order, without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.common.rows.interface import NormInputs, ScaledCall
from ejkernel_cuda._library import handler
from ejkernel_cuda._rows.capability import MOST_BLOCKS, blocks_per_partial
from ejkernel_cuda._rows.config import BackwardConfig, ForwardConfig

_FLOAT = jnp.float32


def _parameters(values: Sequence[Any], x: Any) -> list[Any]:
    dtype = x.dtype if all(value is None or value.dtype == x.dtype for value in values) else _FLOAT
    return [jnp.zeros((0, x.shape[-1]), dtype) if value is None else value.astype(dtype) for value in values]


def _batched(x: Any) -> tuple[int, int, int]:
    """[batch, rows, width] of `[b, ..., d]`."""
    return x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]


class Normed(NamedTuple):
    """Results of forward: `out`; `sum` of add_rms_norm; `mean` of layer_norm; `mean` and `rstd` only if residuals are saved."""

    out: Any
    sum: Any
    mean: Any
    rstd: Any


def norm_forward(
    name: str,
    call: ScaledCall,
    inputs: NormInputs,
    config: ForwardConfig,
    *,
    centred: bool = False,
    residual: Any = None,
) -> Normed:
    """Normalise x, or the sum of x and `residual`."""
    x, scale, offset = inputs
    if not x.size:
        # Rows without columns have mean 0 and variance 0.
        rstd = jnp.full(x.shape[:-1], call.epsilon**-0.5 if call.epsilon else jnp.inf, _FLOAT)
        if not call.save_residuals:
            return Normed(x, residual, None, None)
        return Normed(x, residual, jnp.zeros_like(rstd) if centred else None, rstd)
    batch, rows, _ = shape = _batched(x)
    saved = batch * rows if call.save_residuals else 0
    out, total, mean, rstd = jax.ffi.ffi_call(
        handler(f"{name}_forward"),
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct((0,) if residual is None else shape, x.dtype),
            jax.ShapeDtypeStruct((saved if centred else 0,), _FLOAT),
            jax.ShapeDtypeStruct((saved,), _FLOAT),
        ),
    )(
        x.reshape(shape),
        _addend(residual, x),
        *_parameters((scale, offset), x),
        epsilon=np.float32(call.epsilon),
        scale_offset=np.float32(call.scale_offset),
        threads=np.int64(config.threads),
        cluster=np.int64(config.cluster),
        stages=np.int64(config.num_stages),
    )
    return Normed(
        out.reshape(x.shape),
        None if residual is None else total.reshape(x.shape),
        mean.reshape(x.shape[:-1]) if saved and centred else None,
        rstd.reshape(x.shape[:-1]) if saved else None,
    )


def _addend(array: Any, x: Any) -> Any:
    """The residual as the handler takes it, shaped like x; empty when absent."""
    return jnp.zeros((0,), x.dtype) if array is None else array.reshape(_batched(x))


def norm_backward(
    name: str,
    call: ScaledCall,
    inputs: NormInputs,
    mean: Any,
    rstd: Any,
    grad: Any,
    config: BackwardConfig,
    *,
    grad_sum: Any = None,
) -> NormInputs:
    """Gradients of x and the parameters. `mean` is None for RMS norms. In add_rms_norm, x is the saved sum, `grad_sum` the
    cotangent of that sum, and the gradient of x that of both addends."""
    x, scale, offset = inputs
    if not x.size:
        return NormInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs))
    batch, rows, width = shape = _batched(x)
    groups = batch if any(value is not None and value.shape[0] > 1 for value in (scale, offset)) else 1
    count = max(1, min(-(-config.partials // groups), batch * rows // groups))
    if scale is None and offset is None:
        count = min(batch * rows, 8 * config.partials)
    count = min(count, MOST_BLOCKS // (groups * blocks_per_partial(width)))
    totals = [
        jax.ShapeDtypeStruct((0, width), _FLOAT) if value is None else jax.ShapeDtypeStruct(value.shape, value.dtype)
        for value in (scale, offset)
    ]
    partials = [jax.ShapeDtypeStruct((0 if value is None else groups, count, width), _FLOAT) for value in (scale, offset)]
    d_x, d_scale, d_offset, *_ = jax.ffi.ffi_call(
        handler(f"{name}_backward"),
        (jax.ShapeDtypeStruct(shape, x.dtype), *totals, *partials),
    )(
        x.reshape(shape),
        *_parameters((scale,), x),
        jnp.zeros((0,), _FLOAT) if mean is None else mean.reshape(batch * rows),
        rstd.reshape(batch * rows),
        grad.reshape(shape),
        _addend(grad_sum, x),
        scale_offset=np.float32(call.scale_offset),
        threads=np.int64(config.threads),
        cluster=np.int64(config.cluster),
        stages=np.int64(config.num_stages),
        partials=np.int64(count),
    )
    return NormInputs(
        d_x.reshape(x.shape),
        None if scale is None else d_scale,
        None if offset is None else d_offset,
    )
