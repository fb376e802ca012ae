"""tokamax: attention and grouped products, each of its implementations as a peer of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Peer, beyond
from ejkernel_bench.peers.jax_attention import window_of


def _attention(call: Any, inputs: Any, implementation: str) -> Function | str:
    reason = beyond(call, "query", "key", "value", "bias", "mask", "softmax_scale", "causal", "window", "logits_soft_cap")
    if reason:
        return reason
    import tokamax

    def attention(inputs: Any) -> Mapping[str, Any]:
        out = tokamax.dot_product_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            bias=inputs.bias,
            mask=inputs.mask,
            scale=call.softmax_scale,
            is_causal=call.causal,
            local_window_size=window_of(call),
            logits_soft_cap=call.logits_soft_cap,
            implementation=implementation,
        )
        return {"out": out}

    return attention


def _ragged_dot(call: Any, inputs: Any, implementation: str) -> Function | str:
    reason = beyond(call, "lhs", "rhs", "group_sizes", "preferred_element_type", "precision")
    if reason or call.lhs.shape[0] != 1:
        return reason or "does not do a batch"
    import tokamax

    def grouped(inputs: Any) -> Mapping[str, Any]:
        out = tokamax.ragged_dot(
            inputs.lhs[0],
            inputs.rhs[0],
            inputs.group_sizes[0],
            precision=call.precision,
            preferred_element_type=call.preferred_element_type,
            implementation=implementation,
        )
        return {"out": out[None]}

    return grouped


def _peer(implementation: str, backends: tuple[str, ...]) -> Peer:
    return Peer(
        f"tokamax {implementation}",
        {
            "flash_attention": functools.partial(_attention, implementation=implementation),
            "grouped_matmul": functools.partial(_ragged_dot, implementation=implementation),
        },
        modules=("tokamax",),
        distributions={"tokamax": ""},
        backends=backends,
    )


PEERS = (_peer("mosaic", ("gpu", "tpu")), _peer("triton", ("gpu",)), _peer("xla", ("cpu", "gpu", "tpu")))
