"""Contract of `layer_norm`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from ejkernel.operations.common.rows.interface import NormCall, NormInputs, RowNorm

LayerNormInputs = NormInputs


class LayerNormOutputs(NamedTuple):
    """out like x; residuals `[b, ...]`, float32 (float64 for float64): mean(x) and rstd = 1 / sqrt(var(x) + epsilon)."""

    out: Any
    mean: Any = None
    rstd: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormCall(NormCall):
    """Static facts of one `layer_norm`."""


class LayerNorm(RowNorm):
    """`out = (x - mean(x)) / sqrt(var(x) + epsilon) * (scale + scale_offset) + offset`, in float32 inside; var is biased."""

    name = "layer_norm"
    Call = LayerNormCall
    Outputs = LayerNormOutputs
    statistics = ("mean", "rstd")
    flops = (5, 10)


OPERATION = LayerNorm()
