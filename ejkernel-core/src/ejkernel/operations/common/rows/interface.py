"""What the normalisations over rows share: entry point, dimensions and cost."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape, finite_number, normalise_axes


class NormInputs(NamedTuple):
    """x `[b, ..., d]`, scale and offset `[1 or b, d]`."""

    x: Float[Array, "... d"]
    scale: Float[Array, "#b d"] = None
    offset: Float[Array, "#b d"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledCall(Call):
    """Static facts of a normalisation over the last axis that a scale follows."""

    x: ArraySpec
    scale: ArraySpec | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormCall(ScaledCall):
    """Static facts of a normalisation over the last axis."""

    offset: ArraySpec | None = None


ALONG_AXIS = "[size of x along axis]"
SHARDABLE_ROWS = ("b", "r1", "r2", "r3", "r4", "r5", "r6")


def row_dims(rank: int) -> tuple[str, ...]:
    """Factors of the leading axes of a canonical array `[b, ..., d]` of this rank."""
    return ("b", *(f"r{i}" for i in range(1, rank - 1)))


class Rows(NamedTuple):
    """Where the rows of an array lie: `axes`, rising, of an array of this shape."""

    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the axes; of the parameters too."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def _moved(self) -> tuple[int, ...]:
        """The shape with the axes last."""
        return (*(size for axis, size in enumerate(self.shape) if axis not in self.axes), *self.sizes)

    def canonical(self, array: Any) -> Any:
        """`[b, ..., d]`: the axes last, as one, below at least one other axis."""
        moved = jnp.moveaxis(array, self.axes, self._last)
        if len(self.axes) > 1:
            moved = moved.reshape(*moved.shape[: -len(self.axes)], math.prod(self.sizes))
        return moved[None] if moved.ndim == 1 else moved

    def restored(self, array: Any) -> Any:
        """The inverse of `canonical`."""
        array = array[0] if len(self.axes) == len(self.shape) else array
        moved = array.reshape(self._moved) if len(self.axes) > 1 else array
        return jnp.moveaxis(moved, self._last, self.axes)

    def parameter(self, array: Any) -> Any:
        """`[1, d]` of a parameter shaped like the axes; None where absent."""
        if array is None:
            return None
        return (array.reshape(math.prod(self.sizes)) if len(self.axes) > 1 else array)[None]

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape) - len(self.axes), len(self.shape)))


def check_rows(name: str, x: Any, axis: int | tuple[int, ...]) -> Rows:
    """The rows of a floating array along one axis or several."""
    check_compute(name, x)
    return Rows(normalise_axes(name, axis, x.ndim), tuple(x.shape))


def check_scaling(
    parameters: Mapping[str, Any],
    sizes: tuple[int, ...],
    meaning: str,
    epsilon: Any,
    scale_offset: Any,
    scales: tuple[str, ...] = ("scale",),
) -> tuple[float, float]:
    """epsilon and scale_offset as floats; every parameter that is there is floating and has these sizes.

    Args:
        parameters: by name; None where absent.
        sizes: of the axes of a row; `meaning` says which sizes they are.
        epsilon: added to the mean square or the variance.
        scale_offset: added to the parameters that `scales` names.
    """
    epsilon = finite_number("epsilon", epsilon, at_least=0)
    scale_offset = finite_number("scale_offset", scale_offset)
    for name, value in parameters.items():
        if value is not None:
            check_compute(name, value)
            check_shape(name, value, sizes, meaning)
    absent = next((name for name in scales if parameters[name] is None), None)
    if absent and scale_offset:
        raise invalid("scale_offset", scale_offset, f"0 without {absent}", remedy=f"pass {absent}, to which it is added")
    return epsilon, scale_offset


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
        self,
        x: Any,
        scale: Any = None,
        offset: Any = None,
        *,
        epsilon: float = 1e-6,
        axis: int | tuple[int, ...] = -1,
        scale_offset: float = 0.0,
    ) -> Bound:
        """Check and bring the normalised axes last, as one.

        Args:
            x: `[..., d, ...]`, floating, at least one axis.
            scale: `[d]` or None (ones); with several axes one axis for each of them, in the order of x.
            offset: like scale, or None (zeros).
            epsilon: added to the mean square or the variance; >= 0.
            axis: the axis of size d, or several that are normalised together.
            scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).
        """
        rows = check_rows("x", x, axis)
        parameters = {"scale": scale, "offset": offset}
        epsilon, scale_offset = check_scaling(parameters, rows.sizes, ALONG_AXIS, epsilon, scale_offset)
        inputs = NormInputs(rows.canonical(x), rows.parameter(scale), rows.parameter(offset))
        call = self.Call(
            x=ArraySpec.of(inputs.x),
            scale=None if scale is None else ArraySpec.of(inputs.scale),
            offset=None if offset is None else ArraySpec.of(inputs.offset),
            epsilon=epsilon,
            scale_offset=scale_offset,
        )

        def finish(outputs: Any) -> Any:
            return rows.restored(outputs.out)

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


def square_unit(dtype: Any, epsilon: float) -> float:
    """The power of two that rows are multiplied by before they are squared in float32.

    With epsilon below their mean, squares that float32 would round to 0 do not matter. So the range of squares moves up as far as
    epsilon allows: with 1e-6 they overflow from 2^105 on rather than from 2^64 on. A factor known beforehand costs nothing; one
    by the row's maximum would read the row once more.
    """
    if not epsilon or jnp.finfo(dtype).maxexp != 128:  # float32 and bfloat16; squares of float16 do not overflow
        return 1.0
    least = math.frexp(epsilon)[1] + 102  # binades of epsilon above float32's smallest normal number and its precision
    return 2.0 ** -min(max(least // 2, 0), 60)
