"""Root-mean-square normalisation on TPU: tiles of whole rows; every array is read once.

The grid runs over groups (rows that share a parameter row) and over their tiles. A TPU core processes the tiles in order, so in
backward the parameters' gradients accumulate in one block that stays in VMEM. Backward recomputes rstd from x, which it loads
anyway.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.operations.rms_norm.interface import OPERATION, RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel.plugin import Phase
from ejkernel_pallas._call import cost_estimate, result_like
from ejkernel_pallas.tpu.rms_norm.config import Config


def _inverse(x: Any, epsilon: float) -> Any:
    """1 / sqrt(mean(x^2) + epsilon) of every row, `[ROWS, 1]`."""
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _forward_kernel(x_ref: Any, *others: Any, call: RmsNormCall) -> None:
    refs = list(others)
    x = x_ref[...].astype(jnp.float32)  # [ROWS, d]
    rstd = _inverse(x, call.epsilon)  # [ROWS, 1]
    out = x * rstd
    if call.scale is not None:
        out = out * (refs.pop(0)[...].astype(jnp.float32) + call.scale_offset)  # [1, d]
    if call.offset is not None:
        out = out + refs.pop(0)[...].astype(jnp.float32)  # [1, d]
    refs[0][...] = out.astype(refs[0].dtype)
    if call.save_residuals:
        refs[1][...] = rstd


def _backward_kernel(x_ref: Any, grad_ref: Any, *others: Any, call: RmsNormCall, rows: int) -> None:
    refs = list(others)
    i_tile = pl.program_id(1)
    i_row = i_tile * x_ref.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (x_ref.shape[0], 1), 0)
    inside = i_row < rows  # what lies beyond the last row is undefined
    x = jnp.where(inside, x_ref[...].astype(jnp.float32), 0.0)  # [ROWS, d]
    grad = jnp.where(inside, grad_ref[...].astype(jnp.float32), 0.0)  # [ROWS, d]
    rstd = _inverse(x, call.epsilon)  # [ROWS, 1]
    normalised = jnp.where(inside, x * rstd, 0.0)
    weighted = grad
    if call.scale is not None:
        weighted = grad * (refs.pop(0)[...].astype(jnp.float32) + call.scale_offset)
    d_x = rstd * (weighted - normalised * jnp.mean(weighted * normalised, axis=-1, keepdims=True))
    refs[0][...] = d_x.astype(refs[0].dtype)

    sums = [grad * normalised] if call.scale is not None else []
    sums += [grad] if call.offset is not None else []
    for ref, value in zip(refs[1:], sums, strict=True):
        total = jnp.sum(value, axis=0, keepdims=True)  # [1, d]
        ref[...] = jnp.where(i_tile == 0, total, ref[...] + total)


def _grouped(inputs: RmsNormInputs) -> tuple[int, int, int]:
    """[groups, rows, width]: rows of a group lie under one row of the parameters."""
    x = inputs.x
    batched = any(value is not None and value.shape[0] > 1 for value in inputs[1:])
    groups = x.shape[0] if batched else 1
    return groups, math.prod(x.shape[:-1]) // groups, x.shape[-1]


def _tile(rows: int, width: int, config: Config) -> tuple[int, pl.BlockSpec, pl.BlockSpec]:
    """Rows of a tile, its block, and the block of one value per row."""
    size = min(config.rows, rows)

    def at(group: Any, tile: Any) -> tuple[Any, Any, int]:
        return group, tile, 0

    return size, pl.BlockSpec((None, size, width), at), pl.BlockSpec((None, size, 1), at)


def _parameter(value: Any) -> tuple[Any, pl.BlockSpec]:
    """A parameter as `[1 or groups, 1, d]`, and its block: the group's row, or the only one."""
    batched = value.shape[0] > 1
    return value[:, None], pl.BlockSpec((None, 1, value.shape[1]), lambda group, tile: (group if batched else 0, 0, 0))


def _semantics() -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))


def _cost(call: RmsNormCall, phase: Phase) -> Any:
    """As the operation counts, one root for each row; backward reads no statistics."""
    counted, rows = OPERATION.cost(call, phase), math.prod(call.x.shape[:-1])
    return cost_estimate(counted.flops, rows, counted.bytes - (4 * rows if phase == "backward" else 0))


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: Config) -> RmsNormOutputs:
    x = inputs.x
    if not x.size:
        rstd = jnp.full(x.shape[:-1], call.epsilon**-0.5 if call.epsilon else jnp.inf, jnp.float32)
        return RmsNormOutputs(x, rstd if call.save_residuals else None)
    groups, rows, width = shape = _grouped(inputs)
    size, block, row_block = _tile(rows, width, config)
    parameters = [_parameter(value) for value in inputs[1:] if value is not None]
    results = [(result_like(x, shape, x.dtype), block)]
    if call.save_residuals:
        results.append((result_like(x, (groups, rows, 1), jnp.float32), row_block))
    out, *rest = pl.pallas_call(
        functools.partial(_forward_kernel, call=call),
        grid=(groups, pl.cdiv(rows, size)),
        in_specs=[block, *(spec for _, spec in parameters)],
        out_specs=[spec for _, spec in results],
        out_shape=[result for result, _ in results],
        compiler_params=_semantics(),
        cost_estimate=_cost(call, "forward"),
        name="ejkernel_rms_norm",
    )(x.reshape(shape), *(value for value, _ in parameters))
    return RmsNormOutputs(out.reshape(x.shape), rest[0].reshape(x.shape[:-1]) if call.save_residuals else None)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: Config
) -> RmsNormInputs:
    x, scale, offset = inputs
    if not x.size:
        return RmsNormInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs))
    groups, rows, width = shape = _grouped(inputs)
    size, block, _ = _tile(rows, width, config)
    scales = [] if scale is None else [_parameter(scale)]
    sum_block = pl.BlockSpec((None, 1, width), lambda group, tile: (group, 0, 0))
    wanted = [value for value in (scale, offset) if value is not None]
    d_x, *sums = pl.pallas_call(
        functools.partial(_backward_kernel, call=call, rows=rows),
        grid=(groups, pl.cdiv(rows, size)),
        in_specs=[block, block, *(spec for _, spec in scales)],
        out_specs=[block, *(sum_block for _ in wanted)],
        out_shape=[result_like(x, shape, x.dtype), *(result_like(x, (groups, 1, width), jnp.float32) for _ in wanted)],
        compiler_params=_semantics(),
        cost_estimate=_cost(call, "backward"),
        name="ejkernel_rms_norm_backward",
    )(x.reshape(shape), cotangents.out.reshape(shape), *(value for value, _ in scales))
    totals = iter(sums)
    return RmsNormInputs(
        d_x.reshape(x.shape), *(None if v is None else _as_parameter(next(totals), v) for v in (scale, offset))
    )


def _as_parameter(sums: Any, parameter: Any) -> Any:
    """`[groups, 1, d]` to the parameter's `[1 or b, d]`."""
    total = sums[:, 0] if parameter.shape[0] == sums.shape[0] else jnp.sum(sums, axis=0)
    return total.astype(parameter.dtype)
