"""Contract of `selective_scan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.random import cumulative
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common.packed import (
    as_bounds,
    check_bounds,
    check_packed,
    check_segments,
    segment_starts,
    zero_outside,
)
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape


class SelectiveScanInputs(NamedTuple):
    """x, dt `[b, t, i]`; A `[1 or b, i, n]`; B, C `[b, t, n]`; D `[1 or b, i]`; initial_state `[b, i, n]`, or `[b, s, i, n]`
    with cu_seqlens, int32 `[1 or b, s + 1]`; resets bool `[1 or b, t]`: before which tokens the state becomes 0."""

    x: Float[Array, "b t i"]
    A: Float[Array, "#b i n"]
    B: Float[Array, "b t n"]
    C: Float[Array, "b t n"]
    D: Float[Array, "#b i"] = None
    dt: Float[Array, "b t i"] = None
    initial_state: Float[Array, "b *s i n"] = None
    resets: Bool[Array, "#b t"] = None
    cu_seqlens: Int32[Array, "#b boundaries"] = None


class SelectiveScanOutputs(NamedTuple):
    """out `[b, t, i]` in the dtype of x; final_state like initial_state, float32 (float64 for float64). There is no residual."""

    out: Float[Array, "b t i"]
    final_state: Float[Array, "b *s i n"]


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
    resets: ArraySpec | None = None
    cu_seqlens: ArraySpec | None = None

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of the states before and after: `[b, i, n]`, or `[b, s, i, n]` of packed sequences."""
        batch, _, channels = self.x.shape
        packed = () if self.cu_seqlens is None else (self.cu_seqlens.shape[1] - 1,)
        return (batch, *packed, channels, self.A.shape[2])


class SelectiveScan(Operation):
    """`h_t = exp(A dt_t) h_(t-1) + dt_t x_t B_t^T`, `y_t = h_t C_t + D x_t`, for every channel i on its own; states are float32.

    Where resets says so, `h_(t-1)` is 0. Tokens outside of every packed sequence take no part, whatever they hold: their outputs
    and gradients are 0.
    """

    name = "selective_scan"
    Call = SelectiveScanCall
    Inputs = SelectiveScanInputs
    Outputs = SelectiveScanOutputs
    revisions = (2, ("resets", "cu_seqlens"))
    differentiable = ("x", "A", "B", "C", "D", "dt", "initial_state")
    shardable = ("b", "i")

    def canonicalise(
        self,
        x: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any = None,
        dt: Any = None,
        initial_state: Any = None,
        seg_ids: Any = None,
        cu_seqlens: Any = None,
    ) -> Bound:
        """Check. Arguments as in `ejkernel.state_space_v1`; x is its hidden_states.

        Tokens of padding are replaced by zeros, which leave the state as it is.
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
        packed = cu_seqlens is not None
        if packed:
            check_packed(cu_seqlens, "x", batch)
            if seg_ids is not None:
                raise invalid(
                    "seg_ids", "an array", "None beside cu_seqlens", remedy="say with one of them where sequences end"
                )
        if initial_state is not None:
            count, meaning = (cu_seqlens.shape[0] - 1, "[n, I, N]") if packed else (batch, "[B, I, N]")
            expected["initial_state"] = (initial_state, (count, channels, width), meaning)
        for name, (array, shape, meaning) in expected.items():
            check_compute(name, array)
            check_shape(name, array, shape, meaning)
        tokens, resets = (x, B, C, dt), None
        if seg_ids is not None:
            check_segments(seg_ids, batch, length)
            part, resets = segment_starts(seg_ids)
            tokens = zero_outside(part, *tokens)
        inputs = SelectiveScanInputs(
            tokens[0],
            A[None],
            tokens[1],
            tokens[2],
            None if D is None else D[None],
            tokens[3],
            initial_state[None] if packed and initial_state is not None else initial_state,
            resets,
            as_bounds(cu_seqlens) if packed else None,
        )
        specs: dict[str, Any] = {name: ArraySpec.of(array) for name, array in named(inputs)}
        call = SelectiveScanCall(**specs)

        def finish(outputs: SelectiveScanOutputs) -> Any:
            return outputs.out, outputs.final_state[0] if packed else outputs.final_state

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_bounds(arrays.get("cu_seqlens"), "x", arrays.get("x"))

    def random_inputs(self, call: SelectiveScanCall, rng: np.random.Generator, **given: Any) -> SelectiveScanInputs:
        """A below 0, small steps above it: states that decay, as trained ones do."""
        known = {
            name: (factor * (0.1 + rng.random(spec.shape, np.float32))).astype(jnp.dtype(spec.dtype))
            for name, factor, spec in (("A", -1.0, call.A), ("dt", 0.1, call.dt))
        }
        if call.resets is not None:
            known["resets"] = rng.random(call.resets.shape) < 4 / max(call.x.shape[1], 4)
        if call.cu_seqlens is not None:
            known["cu_seqlens"] = cumulative(rng, call.cu_seqlens, call.x.shape[1])
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: SelectiveScanCall) -> Mapping[str, str]:
        state = "b i n" if call.cu_seqlens is None else "b s i n"
        return {
            "x": "b t i",
            "A": "b? i n",
            "B": "b t n",
            "C": "b t n",
            "D": "b? i",
            "dt": "b t i",
            "initial_state": state,
            "resets": "b? t",
            "cu_seqlens": "b? boundaries",
            "out": "b t i",
            "final_state": state,
        }

    def time(self, call: SelectiveScanCall) -> Mapping[str, int]:
        return {"t": 0}

    def output_specs(self, call: SelectiveScanCall) -> SelectiveScanOutputs:
        return SelectiveScanOutputs(call.x, ArraySpec(call.state_shape, statistics_dtype(call.x.dtype)))

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
