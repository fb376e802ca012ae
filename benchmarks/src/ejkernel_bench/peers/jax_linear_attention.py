"""jax-linear-attention (`jla`): linear attention, the delta rule, Mamba's scan and a fused loss in Mosaic GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Peer, beyond, same_heads


def _documents(call: Any, inputs: Any) -> dict[str, Any]:
    """Packed sequences as ids; tokens after the last one are a document of their own."""
    if inputs.cu_seqlens is None:
        return {}
    tokens = jnp.arange(call.query.shape[1], dtype=jnp.int32)
    return {"segment_ids": jnp.searchsorted(inputs.cu_seqlens[0], tokens, side="right").astype(jnp.int32)[None]}


def _linear_recurrence(call: Any, inputs: Any) -> Function | str:
    from jla.ops import linear_attention

    decays = [name for name in ("g", "gk", "g_gamma") if getattr(call, name) is not None]
    reason = beyond(call, "query", "key", "value", "g", "gk", "g_gamma", "bonus", "cu_seqlens", "scale") or same_heads(call)
    if reason or len(decays) != 1:
        return reason or "takes one kind of decay"
    if call.bonus is not None and call.gk is None:
        return "takes a bonus beside decays per channel only"

    def recurrence(x: Any) -> Mapping[str, Any]:
        options = {"scale": call.scale, **_documents(call, x)}
        if call.bonus is not None:
            out, _ = linear_attention("rwkv6", x.query, x.key, x.value, g=x.gk, u=x.bonus[0], **options)
        elif call.gk is not None:
            out, _ = linear_attention("gla", x.query, x.key, x.value, g=x.gk, **options)
        else:
            g = x.g if x.g is not None else jnp.broadcast_to(x.g_gamma[:, None], x.query.shape[:3])
            out, _ = linear_attention("simple_gla", x.query, x.key, x.value, g=g, **options)
        return {"out": out}

    return recurrence


def _delta_rule(call: Any, inputs: Any) -> Function | str:
    from jla.ops import linear_attention

    known = ("query", "key", "value", "beta", "decay", "a", "b", "cu_seqlens", "scale", "use_qk_l2norm")
    reason = beyond(call, *known) or same_heads(call)
    if reason:
        return reason
    if call.a is not None or call.b is not None:
        return _general(call)
    if call.beta is None:
        return "needs beta"

    def rule(x: Any) -> Mapping[str, Any]:
        kind = "deltanet" if x.decay is None else "kda" if call.decays_by_channel else "gated_deltanet"
        gates = {"beta": x.beta} if x.decay is None else {"beta": x.beta, "g": x.decay}
        options = {"scale": call.scale, "use_qk_l2norm": call.use_qk_l2norm, **_documents(call, x)}
        return {"out": linear_attention(kind, x.query, x.key, x.value, **gates, **options)[0]}

    return rule


def _general(call: Any) -> Function | str:
    """RWKV-7: there `a` reads the state and `b` is written, here the other way round."""
    from jla.ops import linear_attention

    if call.a is None or call.b is None or not call.decays_by_channel or call.beta is not None or call.use_qk_l2norm:
        return "takes a and b beside decays per channel, without beta and l2-norm"

    def rule(x: Any) -> Mapping[str, Any]:
        gates = {"w": x.decay, "a": x.b, "b": x.a}
        out, _ = linear_attention("rwkv7", x.query, x.key, x.value, **gates, scale=call.scale, **_documents(call, x))
        return {"out": out}

    return rule


def _selective_scan(call: Any, inputs: Any) -> Function | str:
    from jla.ops import linear_attention

    reason = beyond(call, "x", "A", "B", "C", "D", "dt", "initial_state")
    if reason or call.A.shape[0] != 1:
        return reason or "takes one A for the whole batch"

    def scan(x: Any) -> Mapping[str, Any]:
        options = {"d": None if x.D is None else x.D[0], "initial_state": x.initial_state, "output_final_state": True}
        out, state = linear_attention("mamba1", x.C, x.B, x.x, dt=x.dt, a=x.A[0], scale=1.0, **options)
        return {"out": out, "final_state": state}

    return scan


def _linear_cross_entropy(call: Any, inputs: Any) -> Function | str:
    from jla.ops.cross_entropy import linear_cross_entropy_objective

    reason = beyond(call, "x", "targets", "head", "transpose_head", "label_smoothing", "z_loss")
    if reason or call.x.shape[0] != 1 or len(call.x.shape) != 3:
        return reason or "takes one matrix of rows"

    def loss(x: Any) -> Mapping[str, Any]:
        head = x.head[0] if call.transpose_head else x.head[0].T
        options = {"z_loss_weight": call.z_loss, "label_smoothing": call.label_smoothing, "ignore_index": -1}
        return {"total": linear_cross_entropy_objective(x.x[0], head, x.targets[0], **options).objective_sum[None]}

    return loss


PEERS = (
    Peer(
        "jla",
        {
            "linear_recurrence": _linear_recurrence,
            "delta_rule": _delta_rule,
            "selective_scan": _selective_scan,
            "linear_cross_entropy": _linear_cross_entropy,
        },
        ("jla",),
        {"jax-linear-attention": ""},
    ),
)
