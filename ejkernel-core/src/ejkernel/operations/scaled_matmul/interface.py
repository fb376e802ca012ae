"""Contract of `scaled_matmul`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.matrices import matrices, rows_as_given
from ejkernel.operations.common.options import as_precision
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape, result_dtype
from ejkernel.utils.dtypes import FLOAT8


class ScaledMatmulInputs(NamedTuple):
    """lhs `[b, m, k]`; rhs `[1 or b, k, n]`, or `[1 or b, n, k]` with `transpose_rhs`.

    lhs_scale `[1 or b, 1 or m]`, rhs_scale `[1 or b, 1 or n]`.
    """

    lhs: Num[Array, "b m k"]
    rhs: Num[Array, "#b _ _"]
    lhs_scale: Float[Array, "#b #m"]
    rhs_scale: Float[Array, "#b #n"]


class ScaledMatmulOutputs(NamedTuple):
    """out `[b, m, n]` in `out_dtype`. There is no residual."""

    out: Float[Array, "b m n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledMatmulCall(Call):
    """Static facts. The precision is that of sums in float8; None is "highest", float32."""

    lhs: ArraySpec
    rhs: ArraySpec
    lhs_scale: ArraySpec
    rhs_scale: ArraySpec
    out_dtype: str = "bfloat16"
    transpose_rhs: bool = False
    precision: str | None = None

    @property
    def columns(self) -> int:
        """n."""
        return self.rhs.shape[1 if self.transpose_rhs else 2]

    @property
    def in_float8(self) -> bool:
        """Whether both sides are float8, else both are int8."""
        return self.lhs.dtype in FLOAT8

    @property
    def tolerated_as(self) -> str | None:
        """As of `GroupedMatmulCall`."""
        return "bfloat16" if self.in_float8 else None


class ScaledMatmul(Operation):
    """`out_ij = lhs_scale_i * rhs_scale_j * sum_k lhs_ik rhs_kj`, summed in int32 or float32, scaled in float32."""

    name = "scaled_matmul"
    Call = ScaledMatmulCall
    Inputs = ScaledMatmulInputs
    Outputs = ScaledMatmulOutputs
    revisions = (3,)
    differentiable = ("lhs_scale", "rhs_scale")
    shardable = ("b", "m", "n")

    def canonicalise(
        self,
        lhs: Any,
        rhs: Any,
        lhs_scale: Any,
        rhs_scale: Any,
        *,
        transpose_rhs: bool = False,
        out_dtype: Any = None,
        precision: Any = None,
    ) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.scaled_matmul`."""
        if not isinstance(transpose_rhs, bool):
            raise wrong_type("transpose_rhs", repr(transpose_rhs), "a bool")
        _check_sides(lhs, rhs)
        rows, inner = lhs.shape[:-1], lhs.shape[-1]
        if rhs.shape[1 if transpose_rhs else 0] != inner:
            meaning = "[N, K]" if transpose_rhs else "[K, N]"
            remedy = f"transpose_rhs={not transpose_rhs} reads the other axis" if inner in rhs.shape else ""
            raise invalid("rhs", f"shape {tuple(rhs.shape)}", f"{meaning} with K = {inner} as in lhs", remedy=remedy)
        columns = rhs.shape[0 if transpose_rhs else 1]
        _check_scale("lhs_scale", lhs_scale, tuple(rows), "[...] of lhs")
        _check_scale("rhs_scale", rhs_scale, (columns,), "[N]")
        inputs = ScaledMatmulInputs(matrices(lhs, 1), rhs[None], matrices(lhs_scale, 0), matrices(rhs_scale, 0))
        call = ScaledMatmulCall(
            **{name: ArraySpec.of(value) for name, value in inputs._asdict().items()},  # pyright: ignore[reportArgumentType]
            out_dtype=result_dtype("out_dtype", jnp.bfloat16 if out_dtype is None else out_dtype),
            transpose_rhs=transpose_rhs,
            precision=as_precision(precision),
        )

        return Bound(call, inputs, lambda outputs: rows_as_given(outputs.out, tuple(rows)))

    def dimensions(self, call: ScaledMatmulCall) -> Mapping[str, str]:
        return {
            "lhs": "b m k",
            "rhs": "b? n k" if call.transpose_rhs else "b? k n",
            "lhs_scale": "b? m?",
            "rhs_scale": "b? n?",
            "out": "b m n",
        }

    def output_specs(self, call: ScaledMatmulCall) -> ScaledMatmulOutputs:
        return ScaledMatmulOutputs(ArraySpec((*call.lhs.shape[:2], call.columns), call.out_dtype))

    def public(self, call: ScaledMatmulCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: ScaledMatmulCall, phase: Phase) -> Cost:
        """Gradients of scales form the product once more."""
        scales = call.lhs_scale.nbytes + call.rhs_scale.nbytes
        moved = call.lhs.nbytes + call.rhs.nbytes + scales + self.output_specs(call).out.nbytes
        return Cost(2 * call.lhs.size * call.columns, moved + (scales if phase == "backward" else 0))


def _check_sides(lhs: Any, rhs: Any) -> None:
    check_array("lhs", lhs, floating=False)
    check_array("rhs", rhs, ndim=2, floating=False)
    left, right = np.dtype(lhs.dtype).name, np.dtype(rhs.dtype).name
    if left not in ("int8", *FLOAT8):
        remedy = "divide it by its scale and convert it"
        raise wrong_type("lhs", f"dtype {left}", f"int8, {' or '.join(FLOAT8)}", remedy=remedy)
    expected = FLOAT8 if left in FLOAT8 else ("int8",)
    if right not in expected:
        raise wrong_type("rhs", f"dtype {right}", f"{' or '.join(expected)} beside lhs in {left}")
    if lhs.ndim == 0:
        raise invalid("lhs", "shape ()", "[..., K]")


def _check_scale(name: str, scale: Any, full: tuple[int, ...], meaning: str) -> None:
    check_compute(name, scale)
    if scale.shape != ():
        check_shape(name, scale, full, f"{meaning}, or one number")


OPERATION = ScaledMatmul()
