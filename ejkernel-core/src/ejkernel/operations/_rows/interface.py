"""What the normalisations over rows share: door, dims and cost."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from ejkernel._arrays import ArraySpec
from ejkernel.errors import invalid
from ejkernel.operation import Bound, Call, Cost, Operation
from ejkernel.operations._checks import check_shape, normalise_axis
from ejkernel.operations._numbers import check_compute, finite_number, statistics_dtype
from ejkernel.plugin import Phase


class NormInputs(NamedTuple):
    """x `[b, ..., d]`, scale and offset `[1 or b, d]`."""

    x: Any
    scale: Any = None
    offset: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormCall(Call):
    """Static facts of a normalisation over the last axis."""

    x: ArraySpec
    scale: ArraySpec | None = None
    offset: ArraySpec | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0


SHARDABLE_ROWS = ("b", "r1", "r2", "r3", "r4", "r5", "r6")


def row_dims(rank: int) -> tuple[str, ...]:
    """Factors of the leading axes of a canonical array `[b, ..., d]` of this rank."""
    return ("b", *(f"r{i}" for i in range(1, rank - 1)))


class RowNorm(Operation, abc.ABC):
    """A normalisation of the rows of x, `[b, ..., d]`, then `* (scale + scale_offset) + offset`.

    Class attributes:
        statistics: the residual fields of Outputs, one number per row each.
        flops: floating-point operations per element, forward and backward, without parameters.
    """

    Inputs = NormInputs
    differentiable = ("x", "scale", "offset")
    shardable = SHARDABLE_ROWS
    statistics: ClassVar[tuple[str, ...]]
    flops: ClassVar[tuple[int, int]]

    def canonicalise(
        self, x: Any, scale: Any = None, offset: Any = None, *, epsilon: float = 1e-6, axis: int = -1, scale_offset: float = 0.0
    ) -> Bound:
        """Check and bring the normalised axis last.

        Args:
            x: `[..., d, ...]`, floating, at least one axis.
            scale: `[d]` or None (ones).
            offset: `[d]` or None (zeros).
            epsilon: added to the mean square or the variance; >= 0.
            axis: the axis of size d.
            scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).
        """
        check_compute("x", x)
        if x.ndim == 0:
            raise invalid("x", "shape ()", "at least one axis")
        axis = normalise_axis(axis, x.ndim)
        epsilon = finite_number("epsilon", epsilon, at_least=0)
        scale_offset = finite_number("scale_offset", scale_offset)
        for name, value in (("scale", scale), ("offset", offset)):
            if value is not None:
                check_compute(name, value)
                check_shape(name, value, (x.shape[axis],), "[size of x along axis]")
        if scale is None and scale_offset:
            raise invalid("scale_offset", scale_offset, "0 without scale", remedy="pass scale, to which it is added")
        moved = jnp.moveaxis(x, axis, -1)
        inputs = NormInputs(
            moved[None] if x.ndim == 1 else moved,
            None if scale is None else scale[None],
            None if offset is None else offset[None],
        )
        call = self.Call(
            x=ArraySpec.of(inputs.x),
            scale=None if scale is None else ArraySpec.of(inputs.scale),
            offset=None if offset is None else ArraySpec.of(inputs.offset),
            epsilon=epsilon,
            scale_offset=scale_offset,
        )

        def finish(outputs: Any) -> Any:
            return jnp.moveaxis(outputs.out[0] if x.ndim == 1 else outputs.out, -1, axis)

        return Bound(call, inputs, finish)

    def dimensions(self, call: NormCall) -> Mapping[str, str]:
        rows = " ".join(row_dims(len(call.x.shape)))
        return {"x": f"{rows} d", "scale": "b? d", "offset": "b? d", "out": f"{rows} d", **dict.fromkeys(self.statistics, rows)}

    def output_specs(self, call: NormCall) -> Any:
        statistic = ArraySpec(call.x.shape[:-1], statistics_dtype(call.x.dtype)) if call.save_residuals else None
        return self.Outputs(out=call.x, **dict.fromkeys(self.statistics, statistic))

    def public(self, call: NormCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: NormCall, phase: Phase) -> Cost:
        parameters = [spec for spec in (call.scale, call.offset) if spec is not None]
        parameter_bytes = sum(spec.nbytes for spec in parameters)
        statistic_bytes = len(self.statistics) * ArraySpec(call.x.shape[:-1], statistics_dtype(call.x.dtype)).nbytes
        if phase == "forward":
            saved = statistic_bytes if call.save_residuals else 0
            return Cost((self.flops[0] + len(parameters)) * call.x.size, 2 * call.x.nbytes + parameter_bytes + saved)
        scale_bytes = call.scale.nbytes if call.scale is not None else 0
        flops = self.flops[1] + (3 if call.scale is not None else 0) + (1 if call.offset is not None else 0)
        return Cost(flops * call.x.size, 3 * call.x.nbytes + statistic_bytes + scale_bytes + parameter_bytes)


def per_row(parameter: Any, ndim: int) -> Any:
    """A parameter `[1 or b, d]` shaped to broadcast against `[b, ..., d]`."""
    return parameter.reshape(parameter.shape[0], *[1] * (ndim - 2), parameter.shape[1])
