"""flash-linear-attention: gated linear attention and the delta rule, by chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Built, Peer, beyond, same_heads


def _linear_recurrence(call: Any, inputs: Any) -> Function | str:
    decays = [name for name in ("g", "gk", "g_gamma") if getattr(call, name) is not None]
    reason = beyond(call, "query", "key", "value", "g", "gk", "g_gamma", "softmax_scale") or same_heads(call)
    if reason or len(decays) != 1:
        return reason or "takes one kind of decay"
    if call.g_gamma is not None and call.g_gamma.shape[0] != 1:
        return "takes one decay per head for the whole batch"
    if call.gk is not None:
        from fla.ops.gla import chunk_gla

        return lambda x: {"out": chunk_gla(x.query, x.key, x.value, g=x.gk, scale=call.softmax_scale)[0]}
    from fla.ops.simple_gla import chunk_simple_gla

    def simple(x: Any) -> Mapping[str, Any]:
        gamma = None if x.g_gamma is None else x.g_gamma[0].float()
        return {"out": chunk_simple_gla(x.query, x.key, x.value, g=x.g, g_gamma=gamma, scale=call.softmax_scale)[0]}

    return simple


def _delta_rule(call: Any, inputs: Any) -> Function | Built | str:
    reason = beyond(call, "query", "key", "value", "beta", "decay", "softmax_scale", "use_qk_l2norm") or same_heads(call)
    if reason or call.beta is None:
        return reason or "needs beta"
    if call.query.dtype == "float32":
        return "does not take float32"
    options = {"scale": call.softmax_scale, "use_qk_l2norm_in_kernel": call.use_qk_l2norm}
    if call.decay is None:
        from fla.ops.delta_rule import chunk_delta_rule

        return lambda x: {"out": chunk_delta_rule(x.query, x.key, x.value, x.beta, **options)[0]}
    if call.decays_by_channel:
        from fla.ops.kda import chunk_kda

        return lambda x: {"out": chunk_kda(x.query, x.key, x.value, x.decay, x.beta, **options)[0]}
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda x: {"out": chunk_gated_delta_rule(x.query, x.key, x.value, x.decay, x.beta, **options)[0]}


PEERS = (
    Peer(
        "fla",
        {"linear_recurrence": _linear_recurrence, "delta_rule": _delta_rule},
        ("torch", "triton", "fla"),
        {"flash-linear-attention": "", "fla-core": ""},
        ("gpu",),
        "torch",
    ),
)
