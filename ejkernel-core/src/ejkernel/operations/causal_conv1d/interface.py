"""Contract of `causal_conv1d`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.random import cumulative, segments
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.packed import as_bounds, check_bounds, check_packed, check_segments
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape
from ejkernel.utils.integers import as_int32


class CausalConv1dInputs(NamedTuple):
    """x `[b, t, c]`; weight `[1 or b, c, w]`; bias `[1 or b, c]`; initial_state `[b, n, w - 1, c]`, the inputs before the first
    token; seg_ids int32 `[1 or b, t]`; cu_seqlens int32 `[1 or b, n + 1]`, n = 1 without."""

    x: Float[Array, "b t c"]
    weight: Float[Array, "#b c w"]
    bias: Float[Array, "#b c"] = None
    initial_state: Float[Array, "b n _ c"] = None
    seg_ids: Int32[Array, "#b t"] = None
    cu_seqlens: Int32[Array, "#b boundaries"] = None


class CausalConv1dOutputs(NamedTuple):
    """out `[b, t, c]` and, with return_state, final_state `[b, n, w - 1, c]`, in the dtype of x. There is no residual."""

    out: Float[Array, "b t c"]
    final_state: Float[Array, "b n _ c"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalConv1dCall(Call):
    """Static facts.

    Attributes:
        activation: "silu", or None.
        return_state: final_state is wanted.
    """

    x: ArraySpec
    weight: ArraySpec
    bias: ArraySpec | None = None
    initial_state: ArraySpec | None = None
    seg_ids: ArraySpec | None = None
    cu_seqlens: ArraySpec | None = None
    activation: str | None = None
    return_state: bool = False

    @property
    def width(self) -> int:
        """w."""
        return self.weight.shape[2]

    @property
    def sequences(self) -> int:
        """n: how many states each member of the batch has."""
        return 1 if self.cu_seqlens is None else self.cu_seqlens.shape[1] - 1


class CausalConv1d(Operation):
    """`out_t = act(bias + sum_j weight[:, j] x_(t - w + 1 + j))`, channel by channel, in float32 inside.

    Before the first token of a sequence stands initial_state, or 0. Tokens outside of every sequence, and those whose segment is
    below 0, take no part, whatever they hold: their outputs and gradients are 0. A segment is a run of equal ids; the state
    stands before the first run, and final_state is the last w - 1 inputs of the last run.
    """

    name = "causal_conv1d"
    Call = CausalConv1dCall
    Inputs = CausalConv1dInputs
    Outputs = CausalConv1dOutputs
    revisions = (6,)
    renamed = (("segments", "seg_ids"),)
    differentiable = ("x", "weight", "bias", "initial_state")
    shardable = ("b", "c")

    def canonicalise(
        self,
        x: Any,
        weight: Any,
        bias: Any = None,
        initial_state: Any = None,
        seg_ids: Any = None,
        cu_seqlens: Any = None,
        *,
        activation: str | None = None,
        return_state: bool = False,
    ) -> Bound:
        """Check and bring the state to `[B, n, W - 1, C]`. Arguments as in `ejkernel.causal_conv1d`."""
        if not isinstance(return_state, bool):
            raise wrong_type("return_state", repr(return_state), "a bool")
        if activation not in (None, "silu"):
            raise invalid("activation", repr(activation), "None or 'silu'")
        check_compute("x", x, ndim=3)
        batch, length, channels = x.shape
        check_compute("weight", weight, ndim=2)
        check_shape("weight", weight, (channels, weight.shape[1]), "[C, W]")
        width = weight.shape[1]
        if width < 2:
            raise invalid("weight", f"a width of {width}", "at least 2", remedy="a width of 1 is a product")
        if bias is not None:
            check_compute("bias", bias)
            check_shape("bias", bias, (channels,), "[C]")
        packed = cu_seqlens is not None
        if packed:
            check_packed(cu_seqlens, "x", batch)
        if seg_ids is not None:
            if packed:
                raise invalid(
                    "seg_ids", "an array", "None beside cu_seqlens", remedy="say with one of them where sequences end"
                )
            check_segments(seg_ids, batch, length)
        if initial_state is not None:
            check_compute("initial_state", initial_state)
            count, meaning = (cu_seqlens.shape[0] - 1, "[n, W - 1, C]") if packed else (batch, "[B, W - 1, C]")
            check_shape("initial_state", initial_state, (count, width - 1, channels), meaning)
        inputs = CausalConv1dInputs(
            x,
            weight[None],
            None if bias is None else bias[None],
            None if initial_state is None else initial_state[None] if packed else initial_state[:, None],
            None if seg_ids is None else as_int32(seg_ids),
            as_bounds(cu_seqlens) if packed else None,
        )
        specs: dict[str, Any] = {name: ArraySpec.of(array) for name, array in named(inputs)}
        call = CausalConv1dCall(**specs, activation=activation, return_state=return_state)

        def finish(outputs: CausalConv1dOutputs) -> Any:
            if not return_state:
                return outputs.out
            return outputs.out, outputs.final_state[0] if packed else outputs.final_state[:, 0]

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_bounds(arrays.get("cu_seqlens"), "x", arrays.get("x"))

    def random_inputs(self, call: CausalConv1dCall, rng: np.random.Generator, **given: Any) -> CausalConv1dInputs:
        known: dict[str, Any] = {}
        if call.seg_ids is not None:
            known["seg_ids"] = segments(call.seg_ids)
        if call.cu_seqlens is not None:
            known["cu_seqlens"] = cumulative(rng, call.cu_seqlens, call.x.shape[1])
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: CausalConv1dCall) -> Mapping[str, str]:
        return {
            "x": "b t c",
            "weight": "b? c w",
            "bias": "b? c",
            "initial_state": "b n m c",
            "seg_ids": "b? t",
            "cu_seqlens": "b? s",
            "out": "b t c",
            "final_state": "b n m c",
        }

    def time(self, call: CausalConv1dCall) -> Mapping[str, int]:
        return {"t": 0}

    def output_specs(self, call: CausalConv1dCall) -> CausalConv1dOutputs:
        batch, _, channels = call.x.shape
        state = ArraySpec((batch, call.sequences, call.width - 1, channels), call.x.dtype)
        return CausalConv1dOutputs(call.x, state if call.return_state else None)

    def public(self, call: CausalConv1dCall) -> tuple[str, ...]:
        return ("out", "final_state") if call.return_state else ("out",)

    def cost(self, call: CausalConv1dCall, phase: Phase) -> Cost:
        """A multiplication and an addition per tap; the gradient takes the taps three times."""
        flops = 2 * call.x.size * call.width
        read = sum(spec.nbytes for spec in vars(call).values() if isinstance(spec, ArraySpec))
        written = sum(spec.nbytes for _, spec in named(self.output_specs(call)))
        if phase == "forward":
            return Cost(flops, read + written)
        return Cost(3 * flops, 2 * read + written)


OPERATION = CausalConv1d()
