"""Contract of `rms_norm`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel._arrays import ArraySpec
from ejkernel.errors import invalid
from ejkernel.operation import Bound, Call, Cost, Operation
from ejkernel.operations._checks import check_array, check_shape, normalise_axis
from ejkernel.plugin import Phase


class RmsNormInputs(NamedTuple):
    """x `[b, ..., d]`, scale and offset `[1 or b, d]`."""

    x: Any
    scale: Any = None
    offset: Any = None


class RmsNormOutputs(NamedTuple):
    """out like x; rstd = 1 / sqrt(mean(x^2) + epsilon), float32 `[b, ...]`, a residual."""

    out: Any
    rstd: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RmsNormCall(Call):
    x: ArraySpec
    scale: ArraySpec | None = None
    offset: ArraySpec | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0


class RmsNorm(Operation):
    """`out = x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset) + offset`, in float32 inside."""

    name = "rms_norm"
    Call = RmsNormCall
    Inputs = RmsNormInputs
    Outputs = RmsNormOutputs
    differentiable = ("x", "scale", "offset")
    shardable = ("b", "r1", "r2", "r3", "r4", "r5", "r6")

    def canonicalise(
        self, x: Any, scale: Any = None, offset: Any = None, *, epsilon: float = 1e-6, axis: int = -1, scale_offset: float = 0.0
    ) -> Bound:
        """Check and bring the normalised axis last.

        Args:
            x: `[..., d, ...]`, floating, at least one axis.
            scale: `[d]` or None (ones).
            offset: `[d]` or None (zeros).
            epsilon: added to the mean square; >= 0.
            axis: the axis of size d.
            scale_offset: added to `scale`; 1 for checkpoints that store `scale - 1` (Gemma).
        """
        check_array("x", x)
        axis = normalise_axis(axis, x.ndim)
        if epsilon < 0:
            raise invalid("epsilon", epsilon, "a value >= 0")
        for name, value in (("scale", scale), ("offset", offset)):
            if value is not None:
                check_array(name, value)
                check_shape(name, value, (x.shape[axis],), "[size of x along axis]")
        if scale is None and scale_offset:
            raise invalid("scale_offset", scale_offset, "0 without scale", remedy="pass scale, to which it is added")
        moved = jnp.moveaxis(x, axis, -1)
        inputs = RmsNormInputs(
            moved[None] if x.ndim == 1 else moved,
            None if scale is None else scale[None],
            None if offset is None else offset[None],
        )
        call = RmsNormCall(
            x=ArraySpec.of(inputs.x),
            scale=None if scale is None else ArraySpec.of(inputs.scale),
            offset=None if offset is None else ArraySpec.of(inputs.offset),
            epsilon=float(epsilon),
            scale_offset=float(scale_offset),
        )

        def finish(outputs: RmsNormOutputs) -> Any:
            return jnp.moveaxis(outputs.out[0] if x.ndim == 1 else outputs.out, -1, axis)

        return Bound(call, inputs, finish)

    def dimensions(self, call: RmsNormCall) -> Mapping[str, str]:
        rows = "b " + " ".join(self.shardable[1 : len(call.x.shape) - 1])
        return {"x": f"{rows} d", "scale": "b? d", "offset": "b? d", "out": f"{rows} d", "rstd": rows}

    def output_specs(self, call: RmsNormCall) -> RmsNormOutputs:
        return RmsNormOutputs(call.x, ArraySpec(call.x.shape[:-1], "float32") if call.save_residuals else None)

    def public(self, call: RmsNormCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: RmsNormCall, phase: Phase) -> Cost:
        passes = 2 if phase == "forward" else 3
        return Cost((4 if phase == "forward" else 10) * call.x.size, passes * call.x.nbytes)


OPERATION = RmsNorm()
