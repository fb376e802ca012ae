"""`jax.nn.dot_product_attention`: plain XLA, and cuDNN on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Peer, beyond


def window_of(call: Any) -> tuple[int, int] | None:
    """The call's window with both sides as numbers, where one that reaches past the arrays stands for none."""
    if call.window is None:
        return None
    left, right = call.window
    return (call.key.shape[1] + call.query.shape[1] if left is None else left, call.key.shape[1] if right is None else right)


def _attention(call: Any, inputs: Any, implementation: Any) -> Function | str:
    known = ["query", "key", "value", "bias", "mask", "softmax_scale", "causal", "window"]
    reason = beyond(call, *known[:3], *known[5:]) if implementation == "cudnn" else beyond(call, *known)
    if reason:
        return reason
    if implementation == "cudnn" and call.query.dtype == "float32":
        return "cuDNN takes bfloat16 and float16"

    def attention(inputs: Any) -> Mapping[str, Any]:
        out = jax.nn.dot_product_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            bias=inputs.bias,
            mask=inputs.mask,
            scale=call.softmax_scale,
            is_causal=call.causal,
            local_window_size=window_of(call),
            implementation=implementation,
        )
        return {"out": out}

    return attention


PEERS = (
    Peer("jax.nn", {"flash_attention": functools.partial(_attention, implementation="xla")}),
    Peer("jax.nn cudnn", {"flash_attention": functools.partial(_attention, implementation="cudnn")}, backends=("gpu",)),
)
