"""The kernels that JAX ships as examples of Pallas on GPUs: attention, norms, softmax. They compile through Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Builder, Peer, beyond


def _attention(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "query", "key", "value", "softmax_scale", "causal", "query_segments", "key_segments")
    if reason:
        return reason
    if call.query.shape[2] != call.key.shape[2] or call.query.shape[3] != call.value.shape[3]:
        return "takes as many heads of keys, and values as wide, as queries"
    if call.query_segments is not None and not np.array_equal(inputs.query_segments, inputs.key_segments):
        return "takes one array of segments for queries and keys"
    from jax.experimental.pallas.ops.gpu.attention import mha

    def attention(inputs: Any) -> Mapping[str, Any]:
        segments = inputs.query_segments
        if segments is not None:
            segments = jnp.broadcast_to(segments, inputs.query.shape[:2])
        return {"out": mha(inputs.query, inputs.key, inputs.value, segments, call.softmax_scale, call.causal)}

    return attention


def _norm(name: str) -> Builder:
    def build(call: Any, inputs: Any) -> Function | str:
        reason = beyond(call, "x", "scale", "offset", "epsilon")
        if reason:
            return reason
        if name == "rms_norm":
            from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm as norm
        else:
            from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm as norm

        def rows(inputs: Any) -> Mapping[str, Any]:
            x, width = inputs.x, inputs.x.shape[-1]
            scale = jnp.ones(width, x.dtype) if inputs.scale is None else inputs.scale[0]
            offset = jnp.zeros(width, x.dtype) if inputs.offset is None else inputs.offset[0]
            out: Any = norm(x.reshape(1, -1, width), scale, offset, eps=call.epsilon)
            return {"out": out.reshape(x.shape)}

        return rows

    return build


def _softmax(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x")
    if reason:
        return reason
    from jax.experimental.pallas.ops.gpu.softmax import softmax

    return lambda inputs: {"out": softmax(inputs.x)}


PEERS = (
    Peer(
        "jax Pallas",
        {
            "flash_attention": _attention,
            "rms_norm": _norm("rms_norm"),
            "layer_norm": _norm("layer_norm"),
            "softmax": _softmax,
        },
        backends=("gpu",),
    ),
)
