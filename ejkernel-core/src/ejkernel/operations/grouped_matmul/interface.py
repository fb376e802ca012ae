"""Contract of `grouped_matmul`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32, Num

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, has_gradient
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.options import as_precision
from ejkernel.operations.grouped_matmul.groups import check_groups, check_sizes, grouping, random_grouping
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape, result_dtype
from ejkernel.utils.dtypes import FLOAT8, common_dtype


class GroupedMatmulInputs(NamedTuple):
    """lhs `[b, m, k]`; rhs `[1 or b, g, k, n]`, or `[1 or b, g, n, k]` with `transpose_rhs`.

    group_sizes int32 `[1 or b, s]`, s >= g: the rows of group 0 come first, then those of group 1. group_offset int32
    `[1 or b]` or None (0): rhs holds the matrices of the groups from group_offset on. existing_out `[b, m, n]` or None (zeros).
    rhs_scale `[1 or b, g, 1 or n]` or None (1); bias `[1 or b, g, n]` or None (0); lhs_scale `[1 or b, 1 or m]` or None (1).
    """

    lhs: Float[Array, "b m k"]
    rhs: Num[Array, "#b g _ _"]
    group_sizes: Int32[Array, "#b s"]
    group_offset: Int32[Array, "#b"] = None
    existing_out: Float[Array, "b m n"] = None
    rhs_scale: Num[Array, "#b g #n"] = None
    bias: Num[Array, "#b g n"] = None
    lhs_scale: Num[Array, "#b #m"] = None


class GroupedMatmulOutputs(NamedTuple):
    """out `[b, m, n]` in the dtype `preferred_element_type`. There is no residual."""

    out: Float[Array, "b m n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmulCall(Call):
    """Static facts.

    Attributes:
        preferred_element_type: dtype of out.
        transpose_rhs: rhs is `[b, g, n, k]`.
        precision: of the products: None (full precision of `product_dtype`), or "default", "high", "highest".
    """

    lhs: ArraySpec
    rhs: ArraySpec
    group_sizes: ArraySpec
    group_offset: ArraySpec | None = None
    existing_out: ArraySpec | None = None
    rhs_scale: ArraySpec | None = None
    bias: ArraySpec | None = None
    lhs_scale: ArraySpec | None = None
    preferred_element_type: str
    transpose_rhs: bool = False
    precision: str | None = None

    @property
    def columns(self) -> int:
        """n."""
        return self.rhs.shape[2 if self.transpose_rhs else 3]

    @property
    def product_dtype(self) -> str:
        """The dtype in which lhs and rhs are multiplied: their common one, that of lhs for int8 and float8 matrices, or bfloat16,
        which holds all their values, where both are float8."""
        return _common_dtype(self.lhs, self.rhs).name

    @property
    def in_float8(self) -> bool:
        """Whether both sides are float8."""
        return self.lhs.dtype in FLOAT8

    @property
    def tolerated_as(self) -> str | None:
        """Tensor cores sum products of float8 in fewer bits than float32 has, which a result in float32 would show."""
        return "bfloat16" if self.in_float8 else None


class GroupedMatmul(Operation):
    """`out_i = lhs_i . rhs_j * lhs_scale_i * rhs_scale_j + bias_j`, j = g - group_offset, for row i of group g.

    Rows whose group has no matrix are those of existing_out. Such rows, past the sum of the sizes or of groups held elsewhere,
    take no part in any gradient, whatever lhs and lhs_scale hold there. lhs and rhs are multiplied in
    `GroupedMatmulCall.product_dtype` (bfloat16 with float32: float32; bfloat16 with int8: bfloat16; float8 with float8: as if in
    bfloat16, exactly), summed, scaled and shifted in float32.
    """

    name = "grouped_matmul"
    Call = GroupedMatmulCall
    Inputs = GroupedMatmulInputs
    Outputs = GroupedMatmulOutputs
    revisions = (7,)
    differentiable = ("lhs", "rhs", "existing_out", "rhs_scale", "bias", "lhs_scale")
    shardable = ("b", "n")

    def canonicalise(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        group_offset: Any = None,
        existing_out: Any = None,
        rhs_scale: Any = None,
        bias: Any = None,
        lhs_scale: Any = None,
        *,
        preferred_element_type: Any = None,
        transpose_rhs: bool = False,
        precision: Any = None,
    ) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.grouped_matmul`."""
        if not isinstance(transpose_rhs, bool):
            raise wrong_type("transpose_rhs", repr(transpose_rhs), "a bool")
        _check_sides(lhs, rhs)
        rows, inner = lhs.shape
        if rhs.shape[2 if transpose_rhs else 1] != inner:
            meaning = "[G, N, K]" if transpose_rhs else "[G, K, N]"
            raise invalid("rhs", f"shape {tuple(rhs.shape)}", f"{meaning} with K = {inner} as in lhs")
        columns = rhs.shape[1 if transpose_rhs else 2]
        check_groups(group_sizes, group_offset, rhs.shape[0], "rhs")
        preferred = _common_dtype(lhs, rhs) if preferred_element_type is None else preferred_element_type
        dtype = result_dtype("preferred_element_type", preferred)
        if existing_out is not None:
            check_shape("existing_out", existing_out, (rows, columns), "[M, N]")
            if np.dtype(existing_out.dtype).name != dtype:
                raise wrong_type("existing_out", f"dtype {existing_out.dtype}", f"{dtype}, the dtype of the result")
        _check_scales_and_bias(lhs_scale, rhs_scale, bias, (rows, rhs.shape[0], columns))
        inputs = GroupedMatmulInputs(
            lhs[None],
            rhs[None],
            *grouping(group_sizes, group_offset),
            None if existing_out is None else existing_out[None],
            None if rhs_scale is None else rhs_scale.reshape(1, rhs.shape[0], *rhs_scale.shape[1:] or (1,)),
            None if bias is None else bias[None],
            None if lhs_scale is None else lhs_scale.reshape(1, -1),
        )
        specs = {name: None if value is None else ArraySpec.of(value) for name, value in inputs._asdict().items()}
        call = GroupedMatmulCall(
            **specs,  # pyright: ignore[reportArgumentType]
            preferred_element_type=dtype,
            transpose_rhs=transpose_rhs,
            precision=as_precision(precision),
        )
        return Bound(call, inputs, lambda outputs: outputs.out[0])

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_sizes(arrays.get("group_sizes"), arrays.get("lhs"), "lhs")

    def random_inputs(self, call: GroupedMatmulCall, rng: np.random.Generator, **given: Any) -> GroupedMatmulInputs:
        """Uneven groups of all rows; with an offset, rhs holds those of the middle."""
        known = random_grouping(rng, call.group_sizes, call.group_offset, call.lhs.shape[1], call.rhs.shape[1])
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: GroupedMatmulCall) -> Mapping[str, str]:
        return {
            "lhs": "b m k",
            "rhs": "b? g n k" if call.transpose_rhs else "b? g k n",
            "group_sizes": "b? s",
            "group_offset": "b?",
            "existing_out": "b m n",
            "rhs_scale": "b? g n?",
            "bias": "b? g n",
            "lhs_scale": "b? m?",
            "out": "b m n",
        }

    def output_specs(self, call: GroupedMatmulCall) -> GroupedMatmulOutputs:
        return GroupedMatmulOutputs(ArraySpec((*call.lhs.shape[:2], call.columns), call.preferred_element_type))

    def public(self, call: GroupedMatmulCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: GroupedMatmulCall, phase: Phase) -> Cost:
        """Exact if every row of lhs belongs to a group of rhs, which the sizes say only at run time."""
        product = 2 * call.lhs.size * call.columns
        out, existing = self.output_specs(call).out.nbytes, 0 if call.existing_out is None else call.existing_out.nbytes
        small = (call.group_sizes, call.rhs_scale, call.bias, call.lhs_scale)
        small = sum(0 if spec is None else spec.nbytes for spec in small)
        if phase == "forward":
            return Cost(product, call.lhs.nbytes + call.rhs.nbytes + small + out)
        sides = [(spec, has_gradient(spec)) for spec in (call.lhs, call.rhs)]
        products = sum(moves for _, moves in sides) + (call.rhs_scale is not None or call.lhs_scale is not None)
        moved = sum((1 + moves) * spec.nbytes for spec, moves in sides) + 2 * small + out + existing
        return Cost(products * product, moved)


def _check_sides(lhs: Any, rhs: Any) -> None:
    check_array("rhs", rhs, ndim=3, floating=False)
    if not jnp.issubdtype(rhs.dtype, jnp.floating) and rhs.dtype != jnp.int8:
        raise wrong_type("rhs", f"dtype {rhs.dtype}", "a floating type or int8")
    check_array("lhs", lhs, ndim=2)
    if np.dtype(lhs.dtype).name not in FLOAT8:
        check_compute("lhs", lhs)
    elif np.dtype(rhs.dtype).name not in FLOAT8:
        remedy = "or convert lhs to bfloat16, which holds its values"
        raise wrong_type("rhs", f"dtype {rhs.dtype}", f"{' or '.join(FLOAT8)} beside lhs in {lhs.dtype}", remedy=remedy)


def _check_scales_and_bias(lhs_scale: Any, rhs_scale: Any, bias: Any, sizes: tuple[int, int, int]) -> None:
    rows, held, columns = sizes
    if lhs_scale is not None:
        check_compute("lhs_scale", lhs_scale)
        if tuple(lhs_scale.shape) not in ((), (rows,)):
            raise invalid("lhs_scale", f"shape {tuple(lhs_scale.shape)}", f"({rows},) or () = [M] or one number")
    if rhs_scale is not None:
        check_compute("rhs_scale", rhs_scale)
        if tuple(rhs_scale.shape) not in ((held,), (held, columns)):
            raise invalid("rhs_scale", f"shape {tuple(rhs_scale.shape)}", f"({held},) or {(held, columns)} = [G] or [G, N]")
    if bias is not None:
        check_compute("bias", bias)
        check_shape("bias", bias, (held, columns), "[G, N]")


def _common_dtype(lhs: Any, rhs: Any) -> Any:
    if np.dtype(lhs.dtype).name in FLOAT8:
        return jnp.dtype(jnp.bfloat16)
    return common_dtype(lhs.dtype, rhs.dtype) if has_gradient(rhs) else jnp.dtype(lhs.dtype)


OPERATION = GroupedMatmul()
