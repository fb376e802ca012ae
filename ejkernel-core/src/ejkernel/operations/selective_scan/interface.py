"""Contract of `selective_scan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape


class SelectiveScanInputs(NamedTuple):
    """x, dt `[b, t, i]`; A `[1 or b, i, n]`; B, C `[b, t, n]`; D `[1 or b, i]`; initial_state `[b, i, n]`."""

    x: Float[Array, "b t i"]
    A: Float[Array, "#b i n"]
    B: Float[Array, "b t n"]
    C: Float[Array, "b t n"]
    D: Float[Array, "#b i"] = None
    dt: Float[Array, "b t i"] = None
    initial_state: Float[Array, "b i n"] = None


class SelectiveScanOutputs(NamedTuple):
    """out `[b, t, i]` in the dtype of x; final_state `[b, i, n]`, float32 (float64 for float64). There is no residual."""

    out: Float[Array, "b t i"]
    final_state: Float[Array, "b i n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveScanCall(Call):
    """Static facts of one `selective_scan`."""

    x: ArraySpec
    A: ArraySpec
    B: ArraySpec
    C: ArraySpec
    dt: ArraySpec
    D: ArraySpec | None = None
    initial_state: ArraySpec | None = None


class SelectiveScan(Operation):
    """`h_t = exp(A dt_t) h_(t-1) + dt_t x_t B_t^T`, `y_t = h_t C_t + D x_t`, for every channel i on its own; states are float32."""

    name = "selective_scan"
    Call = SelectiveScanCall
    Inputs = SelectiveScanInputs
    Outputs = SelectiveScanOutputs
    differentiable = ("x", "A", "B", "C", "D", "dt", "initial_state")
    shardable = ("b", "i")

    def canonicalise(self, x: Any, A: Any, B: Any, C: Any, D: Any = None, dt: Any = None, initial_state: Any = None) -> Bound:
        """Check.

        Args:
            x: `[B,T,I]`, floating.
            A: `[I,N]`.
            B: `[B,T,N]`.
            C: `[B,T,N]`.
            D: `[I]` or None (zeros).
            dt: `[B,T,I]`.
            initial_state: `[B,I,N]` or None (zeros).
        """
        check_compute("x", x, ndim=3)
        check_compute("A", A, ndim=2)
        (batch, length, channels), width = x.shape, A.shape[1]
        expected: dict[str, tuple[Any, tuple[int, ...], str]] = {
            "A": (A, (channels, width), "[I, N]"),
            "B": (B, (batch, length, width), "[B, T, N]"),
            "C": (C, (batch, length, width), "[B, T, N]"),
            "dt": (dt, (batch, length, channels), "[B, T, I]"),
        }
        if D is not None:
            expected["D"] = (D, (channels,), "[I]")
        if initial_state is not None:
            expected["initial_state"] = (initial_state, (batch, channels, width), "[B, I, N]")
        for name, (array, shape, meaning) in expected.items():
            check_compute(name, array)
            check_shape(name, array, shape, meaning)
        inputs = SelectiveScanInputs(x, A[None], B, C, None if D is None else D[None], dt, initial_state)
        specs: dict[str, Any] = {name: ArraySpec.of(array) for name, array in named(inputs)}
        call = SelectiveScanCall(**specs)
        return Bound(call, inputs, lambda outputs: (outputs.out, outputs.final_state))

    def random_inputs(self, call: SelectiveScanCall, rng: np.random.Generator, **given: Any) -> SelectiveScanInputs:
        """A below 0, small steps above it: states that decay, as trained ones do."""
        known = {
            name: (factor * (0.1 + rng.random(spec.shape, np.float32))).astype(jnp.dtype(spec.dtype))
            for name, factor, spec in (("A", -1.0, call.A), ("dt", 0.1, call.dt))
        }
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: SelectiveScanCall) -> Mapping[str, str]:
        return {
            "x": "b t i",
            "A": "b? i n",
            "B": "b t n",
            "C": "b t n",
            "D": "b? i",
            "dt": "b t i",
            "initial_state": "b i n",
            "out": "b t i",
            "final_state": "b i n",
        }

    def output_specs(self, call: SelectiveScanCall) -> SelectiveScanOutputs:
        batch, _, channels = call.x.shape
        return SelectiveScanOutputs(call.x, ArraySpec((batch, channels, call.A.shape[2]), statistics_dtype(call.x.dtype)))

    def public(self, call: SelectiveScanCall) -> tuple[str, ...]:
        return ("out", "final_state")

    def cost(self, call: SelectiveScanCall, phase: Phase) -> Cost:
        """Six operations per state and token forward, exponential included; the gradient forms the states again."""
        out, state = self.output_specs(call)
        read = sum(spec.nbytes for spec in vars(call).values() if isinstance(spec, ArraySpec))
        flops = 6 * call.x.size * call.A.shape[2]
        if phase == "forward":
            return Cost(flops, read + out.nbytes + state.nbytes)
        return Cost(3 * flops, 2 * read + out.nbytes + state.nbytes)


OPERATION = SelectiveScan()
