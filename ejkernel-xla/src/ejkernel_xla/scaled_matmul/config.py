"""Config of `scaled_matmul` on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall
from ejkernel.plugin import ConfigSpace, Target

_OPERANDS = ("stored", "scaled", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class ScaledMatmulConfig:
    """Attributes:
    operands: dtype in which XLA is given lhs and rhs: as they are stored, or one that holds all their values. "scaled": in that
        of the result, times their scales, which XLA hands to cuBLASLt together with the float8 values: the product is scaled in
        float32 before it leaves the registers.
    """

    operands: str = "stored"

    def __post_init__(self) -> None:
        if self.operands not in _OPERANDS:
            raise ValueError(f"operands: got {self.operands!r}, expected one of {', '.join(_OPERANDS)}")


def heuristic(call: ScaledMatmulCall, target: Target) -> ScaledMatmulConfig:
    """As stored, which GPUs with float8 units need to use them. A CPU has none; there int8 is faster as it is stored."""
    if _scales_inside(call, target):
        return ScaledMatmulConfig("scaled")
    return ScaledMatmulConfig("float32" if target.backend == "cpu" and call.in_float8 else "stored")


def search_space(call: ScaledMatmulCall, target: Target) -> tuple[ScaledMatmulConfig, ...]:
    wider = "float32" if target.backend == "cpu" else "bfloat16"
    inside = ("scaled",) if _scales_inside(call, target) else ()
    return tuple(ScaledMatmulConfig(operands) for operands in (*inside, "stored", wider))


def _scales_inside(call: ScaledMatmulCall, target: Target) -> bool:
    """Stored, the product would be written in float32, and read again to be scaled. Where XLA does not hand the scales on, as it
    does on GPUs with float8 units, operands are rounded once more, which is for `precision="default"` alone."""
    numbers = call.lhs_scale.size == 1 == call.rhs_scale.size
    rounds = call.in_float8 and call.precision == "default"
    return numbers and rounds and target.backend == "gpu" and target.capability is not None and target.capability >= (8, 9)


CONFIGS = ConfigSpace(ScaledMatmulConfig, heuristic, search_space)
