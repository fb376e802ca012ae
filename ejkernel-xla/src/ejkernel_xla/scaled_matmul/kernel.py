"""One `dot_general`, which XLA gives to the device's int8 or float8 units, with the scales after it or in its operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall, ScaledMatmulInputs, ScaledMatmulOutputs
from ejkernel.utils.dtypes import common_dtype
from ejkernel_xla._numerics import dot_precision
from ejkernel_xla.scaled_matmul.config import ScaledMatmulConfig


def _unscaled(call: ScaledMatmulCall, inputs: ScaledMatmulInputs, config: ScaledMatmulConfig) -> Any:
    """`lhs . rhs`, `[b, m, n]`, in int32 or float32."""
    lhs, rhs = inputs.lhs, inputs.rhs
    if config.operands in ("stored", "scaled"):
        return _product(call, lhs, rhs, jnp.float32 if call.in_float8 else jnp.int32)
    return _product(call, lhs.astype(config.operands), rhs.astype(config.operands), jnp.float32)


def _product(call: ScaledMatmulCall, lhs: Any, rhs: Any, dtype: Any) -> Any:
    """A shared rhs makes one product of all rows."""
    shared = rhs.shape[0] == 1
    if shared:
        lhs, rhs = lhs.reshape(lhs.shape[0] * lhs.shape[1], lhs.shape[2]), rhs[0]
    last = lhs.ndim - 1
    batch = () if shared else (0,)
    contracted = ((last,), (last if call.transpose_rhs else last - 1,))
    # below the highest precision, tensor cores may sum products of float8 in fewer bits
    precision = dot_precision(call.precision or "highest", lhs.dtype)
    out = jax.lax.dot_general(lhs, rhs, (contracted, (batch, batch)), precision=precision, preferred_element_type=dtype)
    return out.reshape(*call.lhs.shape[:2], call.columns)


def _scaled(product: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
    wide = common_dtype(jnp.float32, common_dtype(lhs_scale.dtype, rhs_scale.dtype))
    return product.astype(wide) * lhs_scale.astype(wide)[:, :, None] * rhs_scale.astype(wide)[:, None, :]


def forward(call: ScaledMatmulCall, inputs: ScaledMatmulInputs, config: ScaledMatmulConfig) -> ScaledMatmulOutputs:
    if config.operands == "scaled" and call.lhs_scale.size == 1 == call.rhs_scale.size:
        # XLA must not merge products of one lhs, whose scales differ, nor convert scales before it reads them out of an array:
        # where nothing is in between, it hands them on in float32
        lhs, *scales = jax.lax.optimization_barrier((inputs.lhs, inputs.lhs_scale.reshape(()), inputs.rhs_scale.reshape(())))
        sides = zip((lhs, inputs.rhs), scales, strict=True)
        lhs, rhs = (side.astype(call.out_dtype) * scale.astype(call.out_dtype) for side, scale in sides)
        return ScaledMatmulOutputs(_product(call, lhs, rhs, call.out_dtype))
    out = _scaled(_unscaled(call, inputs, config), inputs.lhs_scale, inputs.rhs_scale)
    return ScaledMatmulOutputs(out.astype(call.out_dtype))


def backward(
    call: ScaledMatmulCall,
    inputs: ScaledMatmulInputs,
    outputs: ScaledMatmulOutputs,
    cotangents: ScaledMatmulOutputs,
    config: ScaledMatmulConfig,
) -> ScaledMatmulInputs:
    """Those of the scales; a program that does not use them does not form the product again."""
    product = _unscaled(call, inputs, config)
    out, pull = jax.vjp(lambda *scales: _scaled(product, *scales), inputs.lhs_scale, inputs.rhs_scale)
    return ScaledMatmulInputs(None, None, *pull(cotangents.out.astype(out.dtype)))
