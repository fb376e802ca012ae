"""Liger: norms, softmax and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Built, Peer, beyond


def _rms_norm(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "scale", "epsilon", "scale_offset")
    if reason or call.scale is None:
        return reason or "needs a scale"
    from liger_kernel.transformers.functional import liger_rms_norm

    def norm(x: Any) -> Mapping[str, Any]:
        # "gemma": everything in float32, as ours; and the cotangent is needed for the next run
        return {"out": liger_rms_norm(x.x, x.scale[0], call.epsilon, call.scale_offset, "gemma", False)}

    return norm


def _add_rms_norm(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "residual", "scale", "epsilon", "scale_offset")
    if reason or call.scale is None or call.residual.dtype != call.x.dtype:
        return reason or "needs a scale, and a residual in the dtype of x"
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    def norm(x: Any) -> Mapping[str, Any]:
        found = liger_fused_add_rms_norm(x.x, x.residual, x.scale[0], call.epsilon, call.scale_offset, "gemma", False)
        return dict(zip(("out", "sum"), found, strict=True))

    return norm


def _layer_norm(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x", "scale", "offset", "epsilon")
    if reason or call.scale is None or call.offset is None:
        return reason or "needs a scale and an offset"
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x: {"out": liger_layer_norm(x.x, x.scale[0], x.offset[0], call.epsilon)}


def _softmax(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "x")
    if reason:
        return reason
    from liger_kernel.transformers.functional import liger_softmax

    return lambda x: {"out": liger_softmax(x.x)}


def _cross_entropy(call: Any, inputs: Any) -> Built | str:
    reason = beyond(call, "x", "targets", "logit_softcap")
    if reason:
        return reason
    if call.x.dtype != "float32":
        return f"its losses are {call.x.dtype}, as the logits; the call's are float32"
    from liger_kernel.transformers.functional import liger_cross_entropy

    def run(x: Any) -> Mapping[str, Any]:
        logits = x.x.flatten(0, -2)
        loss = liger_cross_entropy(
            logits, x.targets.flatten(), ignore_index=-1, reduction="none", softcap=call.logit_softcap, return_z_loss=False
        )
        return {"loss": loss.reshape(x.targets.shape)}

    alone = "its forward phase makes the gradient, in the place of the logits: there is no backward phase to time"
    return Built(run, lambda x: x._replace(targets=x.targets.long()), refuses_backward=alone)


PEERS = (
    Peer(
        "Liger",
        {
            "rms_norm": _rms_norm,
            "add_rms_norm": _add_rms_norm,
            "layer_norm": _layer_norm,
            "softmax": _softmax,
            "cross_entropy": _cross_entropy,
        },
        ("torch", "triton", "liger_kernel"),
        {"liger-kernel": "0.6.2"},
        ("gpu",),
        "torch",
    ),
)
