"""Logarithm of a sum of exponentials, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from acme_ejkernel.operations.log_sum_exp.interface import LogSumExpCall, LogSumExpInputs, LogSumExpOutputs


def forward(call: LogSumExpCall, inputs: LogSumExpInputs, config: None) -> LogSumExpOutputs:
    wide = call.scale * inputs.x.astype(jnp.float32)
    return LogSumExpOutputs(jax.nn.logsumexp(wide, axis=1).astype(inputs.x.dtype))


def backward(
    call: LogSumExpCall, inputs: LogSumExpInputs, outputs: LogSumExpOutputs, cotangents: LogSumExpOutputs, config: None
) -> LogSumExpInputs:
    weights = jax.nn.softmax(call.scale * inputs.x.astype(jnp.float32), axis=1)
    return LogSumExpInputs((call.scale * weights * cotangents.out.astype(jnp.float32)[:, None]).astype(inputs.x.dtype))


def supports(call: LogSumExpCall, target: object) -> str | None:
    return "acme computes in float32" if call.x.dtype == "float64" else None
