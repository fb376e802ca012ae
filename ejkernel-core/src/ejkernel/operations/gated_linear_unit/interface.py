"""Contract of `gated_linear_unit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.rows.interface import SHARDABLE_ROWS, row_dims
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape, finite_number

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


class GatedLinearUnitInputs(NamedTuple):
    """gate and up `[b, ..., d]`; or up is None, and gate `[b, ..., 2 d]` holds the gate, then up."""

    gate: Float[Array, "*rows _"]
    up: Float[Array, "*rows _"] = None


class GatedLinearUnitOutputs(NamedTuple):
    """out `[b, ..., d]`, in the dtype of gate. There is no residual."""

    out: Float[Array, "*rows d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedLinearUnitCall(Call):
    """Static facts: `activation` is one of `ACTIVATIONS`; `alpha` multiplies the argument of silu's sigmoid."""

    gate: ArraySpec
    up: ArraySpec | None = None
    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    @property
    def width(self) -> int:
        """d."""
        return self.gate.shape[-1] // (2 if self.up is None else 1)


class GatedLinearUnit(Operation):
    """`out = act(min(gate, limit)) * (clip(up, -limit, limit) + up_offset)`, in float32 inside and rounded once.

    A gradient is 0 where its input is beyond the limit; a NaN is kept.
    """

    name = "gated_linear_unit"
    Call = GatedLinearUnitCall
    Inputs = GatedLinearUnitInputs
    Outputs = GatedLinearUnitOutputs
    revisions = (5,)
    differentiable = ("gate", "up")
    shardable = (*SHARDABLE_ROWS, "d")

    def canonicalise(
        self,
        gate: Any,
        up: Any = None,
        *,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
    ) -> Bound:
        """Check; a vector gets an axis before its own. Arguments as in `ejkernel.gated_linear_unit`."""
        check_compute("gate", gate)
        if gate.ndim == 0:
            raise invalid("gate", "shape ()", "at least one axis")
        if up is None and gate.shape[-1] % 2:
            raise invalid("gate", f"{gate.shape[-1]} channels", "an even number of them, gate and up, beside up=None")
        if up is not None:
            check_compute("up", up)
            check_shape("up", up, tuple(gate.shape), "shape of gate")
            if up.dtype != gate.dtype:
                raise wrong_type("up", f"dtype {up.dtype}", f"{gate.dtype} as gate")
        if activation not in ACTIVATIONS:
            raise invalid("activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
        alpha = finite_number("alpha", alpha)
        if alpha != 1 and activation != "silu":
            raise invalid("alpha", alpha, f"1 beside activation {activation!r}", remedy="it is a factor in silu")
        if limit is not None:
            limit = finite_number("limit", limit, at_least=0)
        vector = gate.ndim == 1
        inputs = GatedLinearUnitInputs(*(one[None] if vector and one is not None else one for one in (gate, up)))
        call = GatedLinearUnitCall(
            gate=ArraySpec.of(inputs.gate),
            up=None if up is None else ArraySpec.of(inputs.up),
            activation=activation,
            alpha=alpha,
            limit=limit,
            up_offset=finite_number("up_offset", up_offset),
        )
        return Bound(call, inputs, lambda outputs: outputs.out[0] if vector else outputs.out)

    def dimensions(self, call: GatedLinearUnitCall) -> Mapping[str, str]:
        rows = " ".join(row_dims(len(call.gate.shape)))
        both = "d" if call.up is not None else "w"  # halves of a packed axis may not be split
        return {"gate": f"{rows} {both}", "up": f"{rows} d", "out": f"{rows} {'d' if call.up is not None else 'c'}"}

    def output_specs(self, call: GatedLinearUnitCall) -> GatedLinearUnitOutputs:
        return GatedLinearUnitOutputs(ArraySpec((*call.gate.shape[:-1], call.width), call.gate.dtype))

    def public(self, call: GatedLinearUnitCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: GatedLinearUnitCall, phase: Phase) -> Cost:
        out = self.output_specs(call).out
        return Cost(6 * out.size, 3 * out.nbytes) if phase == "forward" else Cost(14 * out.size, 5 * out.nbytes)


OPERATION = GatedLinearUnit()
