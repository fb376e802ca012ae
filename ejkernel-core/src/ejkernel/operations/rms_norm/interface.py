"""Contract of `rms_norm`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Float

from ejkernel.operations.common.rows.interface import NormCall, NormInputs, RowNorm
from ejkernel.typing import RecordArray as Array

RmsNormInputs = NormInputs


class RmsNormOutputs(NamedTuple):
    """out like x; rstd = 1 / sqrt(mean(x^2) + epsilon), float32 (float64 for float64) `[b, ...]`, a residual."""

    out: Float[Array, "*rows d"]
    rstd: Float[Array, "*rows"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormCall(NormCall):
    """Static facts of one `rms_norm`."""


class RmsNorm(RowNorm):
    """`out = x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset) + offset`, in float32 inside."""

    name = "rms_norm"
    Call = RmsNormCall
    Outputs = RmsNormOutputs
    revisions = (4,)
    statistics = ("rstd",)
    flops = (3, 7)


OPERATION = RmsNorm()
