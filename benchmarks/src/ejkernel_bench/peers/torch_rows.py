"""What one writes in torch and leaves to `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Built, Peer, beyond
from ejkernel_bench.peers._torch import compiled


def _rms_norm(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "scale", "epsilon")
    if reason:
        return reason
    from torch.nn.functional import rms_norm

    norm = compiled(lambda x, scale: rms_norm(x, x.shape[-1:], scale, call.epsilon))
    return lambda x: {"out": norm(x.x, None if x.scale is None else x.scale[0])}


def _add_rms_norm(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "residual", "scale", "epsilon")
    if reason:
        return reason
    from torch.nn.functional import rms_norm

    def both(x: Any, residual: Any, scale: Any) -> Any:
        total = x + residual
        return rms_norm(total, x.shape[-1:], scale, call.epsilon), total

    fused = compiled(both)

    def run(x: Any) -> Mapping[str, Any]:
        return dict(zip(("out", "sum"), fused(x.x, x.residual, None if x.scale is None else x.scale[0]), strict=True))

    return run


def _qk_norm_rope(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "query", "key", "cos", "sin", "rotary_dim", "query_scale", "key_scale", "epsilon")
    if reason or not call.per_pair:
        return reason or "takes one angle per pair of channels"
    import torch
    from torch.nn.functional import rms_norm

    def one(x: Any, scale: Any, cos: Any, sin: Any) -> Any:
        normed = rms_norm(x.float(), x.shape[-1:], None if scale is None else scale.float(), call.epsilon)
        left, right = normed[..., : call.rotary_dim].chunk(2, -1)
        parts = left * cos - right * sin, right * cos + left * sin, normed[..., call.rotary_dim :]
        return torch.cat(parts, -1).to(x.dtype)

    def both(query: Any, key: Any, cos: Any, sin: Any, query_scale: Any, key_scale: Any) -> Any:
        angles = [angle.float()[:, :, None] for angle in (cos, sin)]
        return one(query, query_scale, *angles), one(key, key_scale, *angles)

    fused = compiled(both)

    def run(x: Any) -> Mapping[str, Any]:
        scales = (None if scale is None else scale[0] for scale in (x.query_scale, x.key_scale))
        return dict(zip(("query", "key"), fused(x.query, x.key, x.cos, x.sin, *scales), strict=True))

    return run


def _layer_norm(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "scale", "offset", "epsilon")
    if reason:
        return reason
    from torch.nn.functional import layer_norm

    norm = compiled(lambda x, scale, offset: layer_norm(x, x.shape[-1:], scale, offset, call.epsilon))
    return lambda x: {"out": norm(x.x, *(None if one is None else one[0] for one in (x.scale, x.offset)))}


def _softmax(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "scale")
    if reason:
        return reason
    import torch

    softmax = compiled(lambda x: torch.softmax(call.scale * x.float(), -1).to(x.dtype))
    return lambda x: {"out": softmax(x.x)}


def _cross_entropy(call: Any, inputs: Any) -> Built | str:
    reason = beyond(call, "x", "targets")
    if reason:
        return reason
    from torch.nn.functional import cross_entropy

    loss = compiled(lambda x, targets: cross_entropy(x.float(), targets, ignore_index=-1, reduction="none"))

    def run(x: Any) -> Mapping[str, Any]:
        return {"loss": loss(x.x.flatten(0, -2), x.targets.flatten()).reshape(x.targets.shape)}

    return Built(run, lambda x: x._replace(targets=x.targets.long()))


PEERS = (
    Peer(
        "torch.compile",
        {
            "rms_norm": _rms_norm,
            "add_rms_norm": _add_rms_norm,
            "qk_norm_rope": _qk_norm_rope,
            "layer_norm": _layer_norm,
            "softmax": _softmax,
            "cross_entropy": _cross_entropy,
        },
        ("torch",),
        {"torch": "2.4"},
        ("cpu", "gpu"),
        "torch",
    ),
)
