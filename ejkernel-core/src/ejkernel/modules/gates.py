"""Gated linear units."""

from __future__ import annotations

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public, split
from ejkernel.modules._class_api import class_api
from ejkernel.operations.gated_linear_unit.interface import OPERATION as _GATED_LINEAR_UNIT

__all__ = ["GatedLinearUnit", "gated_linear_unit"]


@public()
def gated_linear_unit(
    gate: t.GateRows,
    up: t.GateRows | None = None,
    *,
    activation: t.GateActivation = "silu",
    alpha: t.Number = 1.0,
    limit: t.Number | None = None,
    up_offset: t.Number = 0.0,
    platform: t.Platforms = None,
    cfg: t.ConfigLike | None = None,
) -> t.GatedRows:
    """`act(gate) * up`, between the products of a feed-forward layer: SwiGLU, GeGLU, ReGLU, GLU.

    With the options: `act(min(gate, limit)) * (clip(up, -limit, limit) + up_offset)`.

    Args:
        gate: `[..., F]`, float32, bfloat16 or float16; or `[..., 2 F]`, the gate then up, beside up=None.
        up: like gate; None = the second half of gate.
        activation: "silu" (SwiGLU), "gelu" (exact) or "gelu_tanh" (GeGLU), "relu" (ReGLU), "sigmoid" (GLU).
        alpha: silu is `x * sigmoid(alpha * x)`.
        limit: at least 0; None = none.
        up_offset: added to up.

    Returns:
        `[..., F]` in the dtype of gate. Float32 inside, rounded once; backward forms the activation again from gate and up.

    Source: Shazeer, GLU variants improve transformer, 2020. alpha=1.702, limit=7, up_offset=1 are those of gpt-oss, which
        stores gate and up interleaved: pass `x[..., ::2], x[..., 1::2]`.
    """
    arrays, options, run = split(locals(), "gate up")
    return _GATED_LINEAR_UNIT.invoke(arrays, options, **run)


GatedLinearUnit = class_api("GatedLinearUnit", gated_linear_unit)
