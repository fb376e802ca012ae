"""Contract of `moe_unpermute`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.moe_permute.interface import check_choices
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape
from ejkernel.utils.integers import as_int32


class MoeUnpermuteInputs(NamedTuple):
    """rows `[b, t * k, d]`; positions int32 `[1 or b, t, k]`, as `moe_permute` returns them; weights `[1 or b, t, k]`."""

    rows: Float[Array, "b m d"]
    positions: Int32[Array, "#b t k"]
    weights: Float[Array, "#b t k"] = None


class MoeUnpermuteOutputs(NamedTuple):
    """out `[b, t, d]` in the dtype of rows. There is no residual."""

    out: Float[Array, "b t d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeUnpermuteCall(Call):
    """Static facts."""

    rows: ArraySpec
    positions: ArraySpec
    weights: ArraySpec | None = None


class MoeUnpermute(Operation):
    """`out[t] = sum_j weights[t, j] * rows[positions[t, j]]`, in float32, rounded once.

    A position below 0 has no part, whatever its weight and the rows past all groups hold: those have gradient 0. A row has at
    most one position p or ~p; with all k copies of t tokens placed, each has one.
    """

    name = "moe_unpermute"
    Call = MoeUnpermuteCall
    Inputs = MoeUnpermuteInputs
    Outputs = MoeUnpermuteOutputs
    revisions = (1,)
    differentiable = ("rows", "weights")
    shardable = ("b", "d")

    def canonicalise(self, rows: Any, positions: Any, weights: Any = None) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.moe_unpermute`."""
        check_compute("rows", rows, ndim=2)
        check_array("positions", positions, ndim=2, floating=False)
        tokens, choices = positions.shape
        check_choices("positions", positions, tokens)
        if rows.shape[0] != tokens * choices:
            raise invalid("rows", f"{rows.shape[0]} rows", f"{tokens * choices} = T * k of positions {(tokens, choices)}")
        if weights is not None:
            check_compute("weights", weights)
            check_shape("weights", weights, (tokens, choices), "[T, k]")
        inputs = MoeUnpermuteInputs(rows[None], as_int32(positions)[None], None if weights is None else weights[None])
        specs: dict[str, Any] = {name: ArraySpec.of(array) for name, array in named(inputs)}
        return Bound(MoeUnpermuteCall(**specs), inputs, lambda outputs: outputs.out[0])

    def random_inputs(self, call: MoeUnpermuteCall, rng: np.random.Generator, **given: Any) -> MoeUnpermuteInputs:
        batch, tokens, choices = call.positions.shape
        drawn = [rng.permutation(tokens * choices) for _ in range(batch)]
        positions = np.asarray(drawn, np.int32).reshape(call.positions.shape)
        return super().random_inputs(call, rng, **{"positions": positions, **given})

    def dimensions(self, call: MoeUnpermuteCall) -> Mapping[str, str]:
        return {"rows": "b m d", "positions": "b? t k", "weights": "b? t k", "out": "b t d"}

    def output_specs(self, call: MoeUnpermuteCall) -> MoeUnpermuteOutputs:
        batch, _, width = call.rows.shape
        return MoeUnpermuteOutputs(ArraySpec((batch, call.positions.shape[1], width), call.rows.dtype))

    def public(self, call: MoeUnpermuteCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: MoeUnpermuteCall, phase: Phase) -> Cost:
        weighted = 1 if call.weights is None else 2
        small = call.positions.nbytes + (0 if call.weights is None else call.weights.nbytes)
        moved = call.rows.nbytes + small + self.output_specs(call).out.nbytes
        if phase == "forward":
            return Cost(weighted * call.rows.size, moved)
        read_again = 0 if call.weights is None else call.rows.nbytes + call.weights.nbytes
        return Cost((2 * weighted - 1) * call.rows.size, moved + read_again)


OPERATION = MoeUnpermute()
