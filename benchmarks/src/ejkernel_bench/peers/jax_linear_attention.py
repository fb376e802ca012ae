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


def _states(call: Any) -> str | None:
    """Why the states of a call are not its: it has one for each row."""
    stated = call.initial_state is not None or call.return_state
    return "has no state for each packed sequence" if stated and call.cu_seqlens is not None else None


def _carried(call: Any, inputs: Any) -> dict[str, Any]:
    state = None if inputs.initial_state is None else inputs.initial_state[:, 0]
    return {"initial_state": state, "output_final_state": call.return_state}


def _results(found: tuple[Any, Any]) -> Mapping[str, Any]:
    out, state = found
    return {"out": out} if state is None else {"out": out, "final_state": state[:, None]}


def _linear_recurrence(call: Any, inputs: Any) -> Function | str:
    from jla.ops import linear_attention

    decays = [name for name in ("g", "gk", "g_gamma") if getattr(call, name) is not None]
    arrays = ("query", "key", "value", "g", "gk", "g_gamma", "bonus", "initial_state", "cu_seqlens")
    known = (*arrays, "softmax_scale", "return_state")
    grouped = decays in (["g"], ["g_gamma"]) and call.query.shape[2] == call.key.shape[2] < call.value.shape[2]
    reason = beyond(call, *known) or (None if grouped else same_heads(call)) or _states(call)
    if reason or len(decays) != 1:
        return reason or "takes one kind of decay"
    if call.bonus is not None and call.gk is None:
        return "takes a bonus beside decays per channel only"

    def recurrence(x: Any) -> Mapping[str, Any]:
        options = {"scale": call.softmax_scale, **_documents(call, x), **_carried(call, x)}
        if call.bonus is not None:
            return _results(linear_attention("rwkv6", x.query, x.key, x.value, g=x.gk, u=x.bonus[0], **options))
        if call.gk is not None:
            return _results(linear_attention("gla", x.query, x.key, x.value, g=x.gk, **options))
        g = x.g if x.g is not None else x.g_gamma[:, None]
        g = jnp.broadcast_to(_repeated(g, x.value.shape[2]), x.value.shape[:3])
        if grouped:
            return _results(_grouped(x.query, x.key, x.value, g, options))
        return _results(linear_attention("simple_gla", x.query, x.key, x.value, g=g, **options))

    return recurrence


def _repeated(array: Any, heads: int) -> Any:
    return jnp.repeat(array, heads // array.shape[2], axis=2)


def _grouped(query: Any, key: Any, value: Any, g: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """As its Mamba-2 calls them: its kernels take groups, its other forms do not."""
    from jla.ops import linear_attention
    from jla.ops.mosaic_gpu import scalar_gate

    if scalar_gate.supports_simple_gla(query, key, value, g, **options):
        return scalar_gate.run(query, key, value, g, None, delta=False, grouped_key_grads=True, **options)
    query, key = (_repeated(array, value.shape[2]) for array in (query, key))
    return linear_attention("simple_gla", query, key, value, g=g, **options)


def _delta_rule(call: Any, inputs: Any) -> Function | str:
    from jla.ops import linear_attention

    gates = ("beta", "decay", "a", "b", "softmax_scale", "use_qk_l2norm")
    known = ("query", "key", "value", *gates, "initial_state", "cu_seqlens", "return_state")
    reason = beyond(call, *known) or same_heads(call) or _states(call)
    if reason:
        return reason
    if call.a is not None or call.b is not None:
        return _general(call)
    if call.beta is None:
        return "needs beta"

    def rule(x: Any) -> Mapping[str, Any]:
        kind = "deltanet" if x.decay is None else "kda" if call.decays_by_channel else "gated_deltanet"
        gates = {"beta": x.beta} if x.decay is None else {"beta": x.beta, "g": x.decay}
        options = {"scale": call.softmax_scale, "use_qk_l2norm": call.use_qk_l2norm, **_documents(call, x), **_carried(call, x)}
        return _results(linear_attention(kind, x.query, x.key, x.value, **gates, **options))

    return rule


def _general(call: Any) -> Function | str:
    """RWKV-7: there `a` reads the state and `b` is written, here the other way round."""
    from jla.ops import linear_attention

    if call.a is None or call.b is None or not call.decays_by_channel or call.beta is not None or call.use_qk_l2norm:
        return "takes a and b beside decays per channel, without beta and l2-norm"

    def rule(x: Any) -> Mapping[str, Any]:
        gates = {"w": x.decay, "a": x.b, "b": x.a}
        options = {"scale": call.softmax_scale, **_documents(call, x), **_carried(call, x)}
        return _results(linear_attention("rwkv7", x.query, x.key, x.value, **gates, **options))

    return rule


def _selective_scan(call: Any, inputs: Any) -> Function | str:
    from jla.ops import linear_attention

    reason = beyond(call, "x", "A", "B", "C", "D", "dt", "initial_state")
    if reason or call.A.shape[0] != 1:
        return reason or "takes one A for the whole batch"

    def scan(x: Any) -> Mapping[str, Any]:
        options: dict[str, Any] = {
            "d": None if x.D is None else x.D[0],
            "initial_state": x.initial_state,
            "output_final_state": True,
        }
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
        options: dict[str, Any] = {"z_loss_weight": call.z_loss, "label_smoothing": call.label_smoothing, "ignore_index": -1}
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
