"""Contract of `fused_linear`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.matrices import matrices, rows_as_given
from ejkernel.operations.common.rows.interface import check_scaling
from ejkernel.operations.gated_linear_unit.interface import ACTIVATIONS
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape


class FusedLinearInputs(NamedTuple):
    """x `[b, m, k]`, weight `[1 or b, n, k]` and residual `[b, m, n]` in one dtype; norm_scale `[1 or b, k]`, bias `[1 or b, n]`.

    With an activation weight and bias hold n / 2 rows of the gate, then those of up, and residual has n / 2 columns.
    """

    x: Float[Array, "b m k"]
    weight: Float[Array, "#b n k"]
    norm_scale: Float[Array, "#b k"] = None
    bias: Float[Array, "#b n"] = None
    residual: Float[Array, "b m _"] = None


class FusedLinearOutputs(NamedTuple):
    """out `[b, m, n]`, or `[b, m, n / 2]` with an activation, in the dtype of x. There is no residual of the forward."""

    out: Float[Array, "b m _"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLinearCall(Call):
    """Static facts: `activation` is one of `gated_linear_unit`'s, or None."""

    x: ArraySpec
    weight: ArraySpec
    norm_scale: ArraySpec | None = None
    bias: ArraySpec | None = None
    residual: ArraySpec | None = None
    activation: str | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.weight.shape[1] // (1 if self.activation is None else 2)


class FusedLinear(Operation):
    """`out = act(norm(x) weight' + bias) + residual`, `norm(x) = x / sqrt(mean(x^2) + epsilon) * (norm_scale + scale_offset)`.

    The norm is rounded to the dtype of x at most once, products are summed in float32, and what follows is float32 until the
    result is rounded. `act(gate, up) = activation(gate) * up`.
    """

    name = "fused_linear"
    Call = FusedLinearCall
    Inputs = FusedLinearInputs
    Outputs = FusedLinearOutputs
    revisions = (6,)
    differentiable = ("x", "weight", "norm_scale", "bias", "residual")
    shardable = ("b", "m", "n")

    def canonicalise(
        self,
        x: Any,
        weight: Any,
        norm_scale: Any = None,
        bias: Any = None,
        residual: Any = None,
        *,
        activation: str | None = None,
        epsilon: float = 1e-6,
        scale_offset: float = 0.0,
    ) -> Bound:
        """Check and bring rows to `[b, m]`. Arguments as in `ejkernel.fused_linear`."""
        check_compute("x", x)
        check_compute("weight", weight, ndim=2)
        if x.ndim == 0:
            raise invalid("x", "shape ()", "[..., K]")
        rows, inner, columns = tuple(x.shape[:-1]), x.shape[-1], weight.shape[0]
        if weight.shape[1] != inner:
            remedy = "transpose it: inputs are last" if columns == inner else ""
            raise invalid("weight", f"shape {tuple(weight.shape)}", f"[N, K] with K = {inner} as in x", remedy=remedy)
        epsilon, scale_offset = check_scaling(
            {"norm_scale": norm_scale}, (inner,), "[K]", epsilon, scale_offset, ("norm_scale",)
        )
        if activation is not None and activation not in ACTIVATIONS:
            raise invalid("activation", repr(activation), f"None or one of {', '.join(ACTIVATIONS)}")
        if activation is not None and columns % 2:
            raise invalid("weight", f"{columns} rows", "an even number of them, gate and up, beside an activation")
        if bias is not None:
            check_compute("bias", bias)
            check_shape("bias", bias, (columns,), "[N]")
        if residual is not None:
            check_compute("residual", residual)
            meaning = "[..., N]" if activation is None else "[..., N / 2]"
            check_shape("residual", residual, (*rows, columns if activation is None else columns // 2), meaning)
        for name, array in (("weight", weight), ("residual", residual)):
            if array is not None and array.dtype != x.dtype:
                raise wrong_type(name, f"dtype {array.dtype}", f"{x.dtype} as x")
        inputs = FusedLinearInputs(
            matrices(x, 1),
            weight[None],
            None if norm_scale is None else norm_scale[None],
            None if bias is None else bias[None],
            None if residual is None else matrices(residual, 1),
        )
        specs: dict[str, Any] = {
            name: None if value is None else ArraySpec.of(value) for name, value in inputs._asdict().items()
        }
        call = FusedLinearCall(**specs, activation=activation, epsilon=epsilon, scale_offset=scale_offset)
        return Bound(call, inputs, lambda outputs: rows_as_given(outputs.out, rows))

    def dimensions(self, call: FusedLinearCall) -> Mapping[str, str]:
        joint = "n" if call.activation is None else "w"  # halves of joint rows may not be split
        columns = "n" if call.activation is None else "c"
        return {
            "x": "b m k",
            "weight": f"b? {joint} k",
            "norm_scale": "b? k",
            "bias": f"b? {joint}",
            "residual": f"b m {columns}",
            "out": f"b m {columns}",
        }

    def output_specs(self, call: FusedLinearCall) -> FusedLinearOutputs:
        return FusedLinearOutputs(ArraySpec((*call.x.shape[:2], call.columns), call.x.dtype))

    def public(self, call: FusedLinearCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: FusedLinearCall, phase: Phase) -> Cost:
        """Of the products, which backward forms anew if there is an activation."""
        given = (call.x, call.weight, call.norm_scale, call.bias, call.residual)
        read, out = sum(spec.nbytes for spec in given if spec is not None), self.output_specs(call).out.nbytes
        product = 2 * call.x.size * call.weight.shape[1]
        if phase == "forward":
            return Cost(product, read + out)
        return Cost((2 if call.activation is None else 3) * product, 2 * read + out)


OPERATION = FusedLinear()
