"""Contract of `add_rms_norm`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, statistics_dtype
from ejkernel.call.records import Bound, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common.rows.interface import (
    ALONG_AXIS,
    SHARDABLE_ROWS,
    ScaledCall,
    check_rows,
    check_scaling,
    row_dims,
)
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute


class AddRmsNormInputs(NamedTuple):
    """x and residual `[b, ..., d]`, each in its own dtype; scale `[1 or b, d]`."""

    x: Float[Array, "*rows d"]
    residual: Float[Array, "*rows d"]
    scale: Float[Array, "#b d"] = None


class AddRmsNormOutputs(NamedTuple):
    """out like x; sum like residual; rstd = 1 / sqrt(mean(sum^2) + epsilon), float32 (float64 for float64) `[b, ...]`, kept for
    backward."""

    out: Float[Array, "*rows d"]
    sum: Float[Array, "*rows d"] = None
    rstd: Float[Array, "*rows"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddRmsNormCall(ScaledCall):
    """Static facts of one `add_rms_norm`."""

    residual: ArraySpec


class AddRmsNorm(Operation):
    """`sum = x + residual`, rounded to the dtype of residual; `out = sum / sqrt(mean(sum^2) + epsilon) * (scale + scale_offset)`.

    In float32 inside. The norm reads the sum as it is returned, rounded: the two results are those of an addition and an
    `rms_norm` one after the other, and backward, which reads no more than that sum, differentiates what forward computed.
    """

    name = "add_rms_norm"
    Call = AddRmsNormCall
    Inputs = AddRmsNormInputs
    Outputs = AddRmsNormOutputs
    revisions = (3,)
    differentiable = ("x", "residual", "scale")
    shardable = SHARDABLE_ROWS

    def canonicalise(
        self,
        x: Any,
        residual: Any,
        scale: Any = None,
        *,
        epsilon: float = 1e-6,
        axis: int | tuple[int, ...] = -1,
        scale_offset: float = 0.0,
    ) -> Bound:
        """Check and bring the normalised axes last, as one. Arguments as in `ejkernel.fused_add_rms_norm`."""
        rows = check_rows("x", x, axis)
        check_compute("residual", residual)
        if tuple(residual.shape) != tuple(x.shape):
            raise invalid("residual", f"shape {tuple(residual.shape)}", f"{tuple(x.shape)}, the shape of x")
        epsilon, scale_offset = check_scaling({"scale": scale}, rows.sizes, ALONG_AXIS, epsilon, scale_offset)
        inputs = AddRmsNormInputs(rows.canonical(x), rows.canonical(residual), rows.parameter(scale))
        call = AddRmsNormCall(
            x=ArraySpec.of(inputs.x),
            residual=ArraySpec.of(inputs.residual),
            scale=None if scale is None else ArraySpec.of(inputs.scale),
            epsilon=epsilon,
            scale_offset=scale_offset,
        )

        def finish(outputs: AddRmsNormOutputs) -> Any:
            return rows.restored(outputs.out), rows.restored(outputs.sum)

        return Bound(call, inputs, finish)

    def dimensions(self, call: AddRmsNormCall) -> Mapping[str, str]:
        rows = " ".join(row_dims(len(call.x.shape)))
        return {**dict.fromkeys(("x", "residual", "out", "sum"), f"{rows} d"), "scale": "b? d", "rstd": rows}

    def output_specs(self, call: AddRmsNormCall) -> AddRmsNormOutputs:
        return AddRmsNormOutputs(call.x, call.residual, _statistics(call) if call.save_residuals else None)

    def public(self, call: AddRmsNormCall) -> tuple[str, ...]:
        return ("out", "sum")

    def cost(self, call: AddRmsNormCall, phase: Phase) -> Cost:
        scale_bytes, scaled = (call.scale.nbytes, 1) if call.scale is not None else (0, 0)
        if phase == "forward":
            saved = _statistics(call).nbytes if call.save_residuals else 0
            return Cost((4 + scaled) * call.x.size, 2 * call.x.nbytes + 2 * call.residual.nbytes + scale_bytes + saved)
        # Reads sum and both cotangents; the gradients of x and residual are one array where their dtypes are one.
        written = call.x.nbytes + (call.residual.nbytes if call.residual.dtype != call.x.dtype else 0)
        moved = call.x.nbytes + 2 * call.residual.nbytes + written + _statistics(call).nbytes + 2 * scale_bytes
        return Cost((8 + 3 * scaled) * call.x.size, moved)


def _statistics(call: AddRmsNormCall) -> ArraySpec:
    return ArraySpec(call.x.shape[:-1], statistics_dtype(call.residual.dtype))


OPERATION = AddRmsNorm()
