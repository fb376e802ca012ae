"""Softmax: the arrays as the library's handlers take them. Backward needs only the result."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.softmax.interface import SoftmaxCall, SoftmaxInputs, SoftmaxOutputs
from ejkernel_cuda._library import handler
from ejkernel_cuda.softmax.config import Config
from ejkernel_cuda.softmax.mask import Axes, axes_of


def _call(name: str, call: SoftmaxCall, arrays: tuple[Any, ...], where: Any, config: Config) -> Any:
    """Call a handler; the result has the shape of x."""
    shape, width = call.x.shape, call.x.shape[-1]
    rows = math.prod(shape[:-1])
    axes = Axes((), ()) if call.where is None else axes_of(call.x, call.where)
    mask = jnp.zeros((0, 1), bool) if where is None else where.reshape(-1, where.shape[-1])
    result = jax.ffi.ffi_call(handler(name), jax.ShapeDtypeStruct((rows, width), arrays[0].dtype))(
        *(array.reshape(rows, width) for array in arrays),
        mask,
        scale=np.float32(call.scale),
        sizes=np.array(axes.sizes, np.int64),
        strides=np.array(axes.strides, np.int64),
        threads=np.int64(config.threads),
        cluster=np.int64(config.cluster),
        stages=np.int64(config.num_stages),
    )
    return result.reshape(shape)


def forward(call: SoftmaxCall, inputs: SoftmaxInputs, config: Config) -> SoftmaxOutputs:
    if not inputs.x.size:
        return SoftmaxOutputs(jnp.zeros_like(inputs.x))
    return SoftmaxOutputs(_call("softmax_forward", call, (inputs.x,), inputs.where, config))


def backward(
    call: SoftmaxCall, inputs: SoftmaxInputs, outputs: SoftmaxOutputs, cotangents: SoftmaxOutputs, config: Config
) -> SoftmaxInputs:
    if not inputs.x.size:
        return SoftmaxInputs(jnp.zeros_like(inputs.x))
    return SoftmaxInputs(_call("softmax_backward", call, (outputs.out, cotangents.out), inputs.where, config))
