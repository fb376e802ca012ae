"""Config of `scaled_matmul` on XLA."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall
from ejkernel.plugin import ConfigSpace, Target

_OPERANDS = ("stored", "bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class ScaledMatmulConfig:
    """Attributes:
    operands: dtype in which XLA is given lhs and rhs: as they are stored, or one that holds all their values.
    """

    operands: str = "stored"

    def __post_init__(self) -> None:
        if self.operands not in _OPERANDS:
            raise ValueError(f"operands: got {self.operands!r}, expected one of {', '.join(_OPERANDS)}")


def heuristic(call: ScaledMatmulCall, target: Target) -> ScaledMatmulConfig:
    """As stored, which GPUs with float8 units need to use them. A CPU has none; there int8 is faster as it is stored."""
    return ScaledMatmulConfig("float32" if target.backend == "cpu" and call.in_float8 else "stored")


def search_space(call: ScaledMatmulCall, target: Target) -> tuple[ScaledMatmulConfig, ...]:
    wider = "float32" if target.backend == "cpu" else "bfloat16"
    return tuple(ScaledMatmulConfig(operands) for operands in ("stored", wider))


CONFIGS = ConfigSpace(ScaledMatmulConfig, heuristic, search_space)
