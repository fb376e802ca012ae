"""Root-mean-square normalisation in blocks of rows: one pass over a block for its statistics, a second for its result.

Every array is seen as `[rows, d]`. The last block is filled up with rows of ones, which have finite statistics for any epsilon.
A parameter is shared by all rows `[1, d]`, or belongs to a batch member `[b, d]`, of which each block looks up its rows'.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from acme_ejkernel.rms_norm.configs import RowBlocks, row_count
from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs


def _blocks(array: Any, rows: int, config: RowBlocks) -> Any:
    """`[..., width]` as `[blocks, config.rows, width]`; `rows` of them are real."""
    width = array.shape[-1]
    padded = jnp.pad(array.reshape(rows, width), ((0, -rows % config.rows), (0, 0)), constant_values=1)
    return padded.reshape(-1, config.rows, width)


def _unblocked(blocks: Any, shape: tuple[int, ...], rows: int) -> Any:
    return blocks.reshape(-1, blocks.shape[-1])[:rows].reshape(shape)


def _members(call: RmsNormCall, config: RowBlocks) -> Any:
    """The batch member of every row, `[blocks, config.rows]`."""
    rows, batch = row_count(call), call.x.shape[0]
    blocks = -(-rows // config.rows)
    index = jnp.arange(blocks * config.rows) // max(1, rows // max(1, batch))
    return jnp.minimum(index, max(0, batch - 1)).reshape(blocks, config.rows)


def _of_rows(parameter: Any, members: Any) -> Any:
    """A parameter for the rows of one block, float32 `[1 or rows, d]`."""
    chosen = parameter if parameter.shape[0] == 1 else jnp.take(parameter, members, axis=0)
    return chosen.astype(jnp.float32)


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: RowBlocks) -> RmsNormOutputs:
    x, scale, offset = inputs
    rows = row_count(call)

    def block(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        x, members = arguments
        wide = x.astype(jnp.float32)  # [rows, d]
        largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1.0))  # [rows, 1]
        small = wide / largest  # its squares stay within float32's range
        rstd = jax.lax.rsqrt(jnp.mean(small * small, axis=-1, keepdims=True) + call.epsilon / largest**2) / largest
        out = wide * rstd
        if scale is not None:
            out = out * (_of_rows(scale, members) + call.scale_offset)
        if offset is not None:
            out = out + _of_rows(offset, members)
        return out.astype(x.dtype), rstd

    out, rstd = jax.lax.map(block, (_blocks(x, rows, config), _members(call, config)))
    saved = _unblocked(rstd, x.shape[:-1], rows) if call.save_residuals else None
    return RmsNormOutputs(_unblocked(out, x.shape, rows), saved)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: RowBlocks
) -> RmsNormInputs:
    x, scale, offset = inputs
    rows = row_count(call)

    def block(arguments: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        x, rstd, grad, real, members = arguments
        grad = jnp.where(real, grad.astype(jnp.float32), 0)  # [rows, d]; rows that only fill up a block add nothing
        normalised = x.astype(jnp.float32) * rstd
        weighted = grad if scale is None else grad * (_of_rows(scale, members) + call.scale_offset)
        d_x = rstd * (weighted - normalised * jnp.mean(weighted * normalised, axis=-1, keepdims=True))
        d_scale = None if scale is None else _partial_sum(scale, grad * normalised)
        return d_x.astype(x.dtype), d_scale, None if offset is None else _partial_sum(offset, grad)

    members = _members(call, config)
    real = (jnp.arange(members.size) < rows).reshape(*members.shape, 1)
    arrays = tuple(_blocks(array, rows, config) for array in (x, outputs.rstd[..., None], cotangents.out))
    d_x, d_scale, d_offset = jax.lax.map(block, (*arrays, real, members))
    return RmsNormInputs(
        _unblocked(d_x, x.shape, rows), _total(call, scale, d_scale, rows), _total(call, offset, d_offset, rows)
    )


def _partial_sum(parameter: Any, per_row: Any) -> Any:
    """A block's part of a shared parameter's gradient `[1, d]`; of a batch member's own, the rows themselves."""
    return jnp.sum(per_row, axis=0, keepdims=True) if parameter.shape[0] == 1 else per_row


def _total(call: RmsNormCall, parameter: Any, parts: Any, rows: int) -> Any:
    if parameter is None:
        return None
    if parameter.shape[0] == 1:
        total = jnp.sum(parts, axis=0)
    else:
        batch, width = parameter.shape
        total = jnp.sum(_unblocked(parts, (batch, rows // batch, width), rows), axis=1)
    return total.astype(parameter.dtype)
