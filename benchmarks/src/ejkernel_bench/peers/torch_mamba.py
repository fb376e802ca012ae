"""mamba_ssm: the scan of Mamba-2.

It computes `S <- exp(dt A) S + dt B x^T` and reads it with C. A recurrence with log decays g and values v is that with A = -1,
dt = -g and x = v / dt. Arguments are prepared so, and gradients brought back by the chain rule, outside of what is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_bench.peers._peer import Built, Peer, beyond

_CHUNK = 256


def _scan(call: Any, inputs: Any) -> Built | str:
    reason = beyond(call, "query", "key", "value", "g", "softmax_scale")
    if reason or call.g is None or call.g.shape[2] != call.value.shape[2]:
        return reason or "needs a log decay g for each head of value"
    if call.query.shape[2] != call.key.shape[2]:
        return "takes as many heads of B as of C"
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def prepare(x: Any) -> Mapping[str, Any]:
        dt = -x.g.float()
        scaled = (x.query * call.softmax_scale).to(x.query.dtype)
        return {"x": (x.value / dt[..., None]).to(x.value.dtype), "dt": dt, "B": x.key, "C": scaled}

    def scan(x: Any) -> Mapping[str, Any]:
        rate = -torch.ones(x.dt.shape[2], device=x.dt.device)
        return {"out": mamba_chunk_scan_combined(x.x, x.dt, rate, x.B, x.C, _CHUNK)}

    def gradients(found: Mapping[str, Any], prepared: Mapping[str, Any]) -> Mapping[str, Any]:
        dt, x = prepared["dt"], prepared["x"]
        value = found["x"].float() / dt[..., None]
        through_value = (x.float() * value).sum(-1)
        return {
            "query": (found["C"] * call.softmax_scale).to(found["C"].dtype),
            "key": found["B"],
            "value": value.to(x.dtype),
            "g": (through_value - found["dt"]).to(getattr(torch, call.g.dtype)),
        }

    return Built(scan, prepare, gradients)


PEERS = (
    Peer(
        "mamba_ssm",
        {"linear_recurrence": _scan},
        ("torch", "triton", "mamba_ssm"),
        {"mamba-ssm": "2.2"},
        ("gpu",),
        "torch",
    ),
)
