"""Contract of `layer_norm`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Float

from ejkernel.operations.common.rows.interface import NormCall, NormInputs, RowNorm
from ejkernel.typing import RecordArray as Array

LayerNormInputs = NormInputs


class LayerNormOutputs(NamedTuple):
    """out like x; residuals `[b, ...]`, float32 (float64 for float64): mean(x) and rstd = 1 / sqrt(var(x) + epsilon)."""

    out: Float[Array, "*rows d"]
    mean: Float[Array, "*rows"] = None
    rstd: Float[Array, "*rows"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormCall(NormCall):
    """Static facts of one `layer_norm`."""


class LayerNorm(RowNorm):
    """`out = (x - mean(x)) / sqrt(var(x) + epsilon) * (scale + scale_offset) + offset`, in float32 inside; var is biased."""

    name = "layer_norm"
    Call = LayerNormCall
    Outputs = LayerNormOutputs
    revisions = (4,)
    statistics = ("mean", "rstd")
    flops = (5, 10)


OPERATION = LayerNorm()
