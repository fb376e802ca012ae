"""Contract of `mean_pooling`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.random import cumulative
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common.packed import as_bounds, check_bounds, check_packed
from ejkernel.operations.common.pages import known_values
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute


class MeanPoolingInputs(NamedTuple):
    """x `[b, t, h, d]`; cu_seqlens int32 `[1 or b, n + 1]`: sequence i is the tokens cu_seqlens[i] up to
    cu_seqlens[i + 1], exclusive."""

    x: Float[Array, "b t h d"]
    cu_seqlens: Int32[Array, "#b boundaries"] = None


class MeanPoolingOutputs(NamedTuple):
    """out `[b, n, h, d]` in the dtype of x; n = 1 without cu_seqlens. There is no residual."""

    out: Float[Array, "b n h d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanPoolingCall(Call):
    """Static facts of one `mean_pooling`."""

    x: ArraySpec
    cu_seqlens: ArraySpec | None = None

    @property
    def sequences(self) -> int:
        """How many means each member of the batch has."""
        return 1 if self.cu_seqlens is None else self.cu_seqlens.shape[1] - 1


class MeanPooling(Operation):
    """`out_i = mean of x_t over the tokens t of sequence i`; 0 for a sequence without tokens. Summed in float32.

    Tokens outside of every sequence take no part, whatever they hold.
    """

    name = "mean_pooling"
    Call = MeanPoolingCall
    Inputs = MeanPoolingInputs
    Outputs = MeanPoolingOutputs
    revisions = (1,)
    differentiable = ("x",)
    shardable = ("b", "h", "d")

    def canonicalise(self, x: Any, cu_seqlens: Any = None) -> Bound:
        """Check; x gets the axes of the batch and of heads if it has none. Arguments as in `ejkernel.mean_pooling`."""
        check_compute("x", x)
        x = _with_batch(x, cu_seqlens)
        if x.ndim not in (3, 4):
            shapes = "[B,T,H,D] or [B,T,D]" + ("" if cu_seqlens is None else ", or packed [N,H,D] or [N,D]")
            raise invalid("x", f"shape {tuple(x.shape)}", shapes)
        if cu_seqlens is not None:
            check_packed(cu_seqlens, "x", x.shape[0])
        inputs = MeanPoolingInputs(
            x if x.ndim == 4 else x[:, :, None, :],
            None if cu_seqlens is None else as_bounds(cu_seqlens),
        )
        call = MeanPoolingCall(
            x=ArraySpec.of(inputs.x), cu_seqlens=None if cu_seqlens is None else ArraySpec.of(inputs.cu_seqlens)
        )

        def finish(outputs: MeanPoolingOutputs) -> Any:
            out = outputs.out[:, 0] if cu_seqlens is None else outputs.out[0]
            return out if x.ndim == 4 else out[:, 0]

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_bounds(arrays.get("cu_seqlens"), "x", _with_batch(arrays.get("x"), arrays.get("cu_seqlens")))

    def random_inputs(self, call: MeanPoolingCall, rng: np.random.Generator, **given: Any) -> MeanPoolingInputs:
        if call.cu_seqlens is not None:
            given = {"cu_seqlens": cumulative(rng, call.cu_seqlens, call.x.shape[1]), **given}
        return super().random_inputs(call, rng, **given)

    def dimensions(self, call: MeanPoolingCall) -> Mapping[str, str]:
        return {"x": "b t h d", "cu_seqlens": "b? s", "out": "b n h d"}

    def output_specs(self, call: MeanPoolingCall) -> MeanPoolingOutputs:
        batch, _, heads, width = call.x.shape
        return MeanPoolingOutputs(ArraySpec((batch, call.sequences, heads, width), call.x.dtype))

    def public(self, call: MeanPoolingCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: MeanPoolingCall, phase: Phase) -> Cost:
        out = self.output_specs(call).out
        moved = call.x.nbytes + out.nbytes + (0 if call.cu_seqlens is None else call.cu_seqlens.nbytes)
        return Cost(call.x.size + out.size if phase == "forward" else out.size, moved)


def _with_batch(x: Any, cu_seqlens: Any) -> Any:
    """Packed tokens in one row: two axes, or three of which the first is not a batch."""
    ndim = getattr(x, "ndim", 0)
    if cu_seqlens is None or ndim not in (2, 3) or (ndim == 3 and x.shape[0] == 1):
        return x
    known = known_values(cu_seqlens) if ndim == 3 else None
    several_rows = known is not None and known.size and x.shape[0] < known.reshape(-1)[-1] <= x.shape[1]
    return x if several_rows else x[None]


OPERATION = MeanPooling()
