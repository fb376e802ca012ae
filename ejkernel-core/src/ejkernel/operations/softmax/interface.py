"""Contract of `softmax`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.rows.interface import SHARDABLE_ROWS, row_dims
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, finite_number, normalise_axes
from ejkernel.utils.dtypes import accumulator, multiplied
from ejkernel.utils.tracing import is_traced, traced_number


class SoftmaxInputs(NamedTuple):
    """x `[b, ..., d]`; where bool, of the same rank, each axis as in x or 1: True = takes part."""

    x: Float[Array, "*rows d"]
    where: Bool[Array, "*shape"] = None


class SoftmaxOutputs(NamedTuple):
    """out like x. Backward reads it; there is no other residual."""

    out: Float[Array, "*rows d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxCall(Call):
    """Static facts: `scale` is the factor on x."""

    x: ArraySpec
    where: ArraySpec | None = None
    scale: float = 1.0


class Softmax(Operation):
    """`out_i = exp(scale * x_i) / sum_j exp(scale * x_j)` over the last axis, j over the places where `where` is True.

    In float32 inside. A place that is masked, or whose x is -inf, gets 0; a row of nothing else is all 0. What x and the
    cotangent hold at masked places, NaN included, has no effect.
    """

    name = "softmax"
    Call = SoftmaxCall
    Inputs = SoftmaxInputs
    Outputs = SoftmaxOutputs
    revisions = (2,)
    differentiable = ("x",)
    shardable = SHARDABLE_ROWS
    traceable = ("scale",)

    def canonicalise(self, x: Any, where: Any = None, *, axis: int | tuple[int, ...] | None = -1, scale: float = 1.0) -> Bound:
        """Check and bring the summed axes last, as one. Arguments as in `ejkernel.softmax`."""
        check_compute("x", x)
        axes = normalise_axes("x", tuple(range(x.ndim)) if axis is None else axis, x.ndim)
        dtype = x.dtype
        if is_traced(scale):
            factor, scale = traced_number("scale", scale, accumulator(dtype)), 1.0
            x = multiplied(x.astype(factor.dtype), factor)
        scale = finite_number("scale", scale)
        summed = tuple(range(x.ndim - len(axes), x.ndim))
        moved = jnp.moveaxis(x, axes, summed)
        rows = moved.shape[: x.ndim - len(axes)]
        canonical = (*(rows or (1,)), math.prod(moved.shape[len(rows) :]))
        if where is not None:
            _check_where(where, x.shape)
            where = jnp.moveaxis(where.reshape((1,) * (x.ndim - where.ndim) + where.shape), axes, summed)
            kept = where.shape[: len(rows)]
            if math.prod(where.shape[len(rows) :]) != 1:
                where = jnp.broadcast_to(where, (*kept, *moved.shape[len(rows) :]))
            where = where.reshape(*(kept or (1,)), math.prod(where.shape[len(rows) :]))
        inputs = SoftmaxInputs(moved.reshape(canonical), where)
        call = SoftmaxCall(x=ArraySpec.of(inputs.x), where=None if where is None else ArraySpec.of(where), scale=scale)

        def finish(outputs: SoftmaxOutputs) -> Any:
            return jnp.moveaxis(outputs.out.reshape(moved.shape), summed, axes).astype(dtype)

        return Bound(call, inputs, finish)

    def random_inputs(self, call: SoftmaxCall, rng: np.random.Generator, **given: Any) -> SoftmaxInputs:
        """Half of the places are masked."""
        if call.where is not None:
            given = {"where": rng.random(call.where.shape) < 0.5, **given}
        return super().random_inputs(call, rng, **given)

    def dimensions(self, call: SoftmaxCall) -> Mapping[str, str]:
        rows = row_dims(len(call.x.shape))
        return {
            "x": " ".join((*rows, "d")),
            "where": " ".join(f"{factor}?" for factor in (*rows, "d")),
            "out": " ".join((*rows, "d")),
        }

    def output_specs(self, call: SoftmaxCall) -> SoftmaxOutputs:
        return SoftmaxOutputs(call.x)

    def public(self, call: SoftmaxCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: SoftmaxCall, phase: Phase) -> Cost:
        mask_bytes = 0 if call.where is None else call.where.nbytes
        scaling = 1 if call.scale != 1 else 0
        if phase == "forward":
            return Cost((5 + scaling) * call.x.size, 2 * call.x.nbytes + mask_bytes)
        return Cost((4 + scaling) * call.x.size, 3 * call.x.nbytes + mask_bytes)


def _check_where(where: Any, shape: tuple[int, ...]) -> None:
    check_array("where", where, floating=False)
    if where.dtype != bool:
        raise wrong_type("where", f"dtype {where.dtype}", "bool", remedy="True marks the places that take part")
    aligned = shape[len(shape) - where.ndim :]
    if where.ndim > len(shape) or any(size not in (1, full) for size, full in zip(where.shape, aligned, strict=True)):
        raise invalid("where", f"shape {tuple(where.shape)}", f"a shape that broadcasts to {tuple(shape)} = x")


OPERATION = Softmax()
