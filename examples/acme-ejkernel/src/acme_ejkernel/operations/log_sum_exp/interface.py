"""Contract of `log_sum_exp`: every platform that brings code for it is held to this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ejkernel.operation import ArraySpec, Bound, Call, Cost, Operation, Phase, check_compute, finite_number


class LogSumExpInputs(NamedTuple):
    x: Any  # [b, d]


class LogSumExpOutputs(NamedTuple):
    out: Any  # [b], in the dtype of x; there is no residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogSumExpCall(Call):
    """Static facts of one `log_sum_exp`."""

    x: ArraySpec
    scale: float = 1.0


class LogSumExp(Operation):
    """`out_b = log(sum_d exp(scale * x_bd))`, summed in float32. `vmap` folds into the first dimension, devices split it."""

    name = "log_sum_exp"
    Call = LogSumExpCall
    Inputs = LogSumExpInputs
    Outputs = LogSumExpOutputs
    revisions = (1,)
    differentiable = ("x",)

    def canonicalise(self, x: Any, *, scale: float = 1.0) -> Bound:
        check_compute("x", x, ndim=2)
        if x.shape[1] == 0:
            raise ValueError(f"x: got shape {x.shape}, expected rows with at least one element")
        call = LogSumExpCall(x=ArraySpec.of(x), scale=finite_number("scale", scale))
        return Bound(call, LogSumExpInputs(x), lambda outputs: outputs.out)

    def dimensions(self, call: LogSumExpCall) -> Mapping[str, str]:
        return {"x": "b d", "out": "b"}

    def output_specs(self, call: LogSumExpCall) -> LogSumExpOutputs:
        return LogSumExpOutputs(ArraySpec(call.x.shape[:1], call.x.dtype))

    def public(self, call: LogSumExpCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: LogSumExpCall, phase: Phase) -> Cost:
        return Cost(3 * call.x.size, call.x.nbytes)


OPERATION = LogSumExp()
