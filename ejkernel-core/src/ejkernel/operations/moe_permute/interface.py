"""Contract of `moe_permute`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import wrong_type
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape, integer
from ejkernel.utils.integers import as_int32


class MoePermuteInputs(NamedTuple):
    """x `[b, t, d]`; experts int32 `[b, t, k]`."""

    x: Float[Array, "b t d"]
    experts: Int32[Array, "b t k"]


class MoePermuteOutputs(NamedTuple):
    """rows `[b, t * k, d]` in the dtype of x; int32 group_sizes `[b, e]` and positions `[b, t, k]`, which backward reads."""

    rows: Float[Array, "b m d"]
    group_sizes: Int32[Array, "b e"]
    positions: Int32[Array, "b t k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoePermuteCall(Call):
    """Static facts: num_experts is e, the number of groups."""

    x: ArraySpec
    experts: ArraySpec
    num_experts: int

    @property
    def rows(self) -> int:
        """m = t * k."""
        return self.experts.shape[1] * self.experts.shape[2]


class MoePermute(Operation):
    """k copies of each token, sorted by their experts: `rows[positions[t, j]] = x[t]`.

    Copies for one expert keep their order. Those whose expert is not in `[0, e)` belong to no group: they are the last rows, which
    are 0 whatever x holds, and their positions are `~row`, below 0.
    """

    name = "moe_permute"
    Call = MoePermuteCall
    Inputs = MoePermuteInputs
    Outputs = MoePermuteOutputs
    revisions = (0,)
    differentiable = ("x",)

    def canonicalise(self, x: Any, experts: Any, *, num_experts: int) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.moe_permute`."""
        check_compute("x", x, ndim=2)
        check_choices("experts", experts, x.shape[0])
        inputs = MoePermuteInputs(x[None], as_int32(experts)[None])
        call = MoePermuteCall(
            x=ArraySpec.of(inputs.x),
            experts=ArraySpec.of(inputs.experts),
            num_experts=integer("num_experts", num_experts, 1),
        )
        return Bound(call, inputs, lambda outputs: tuple(output[0] for output in outputs))

    def random_inputs(self, call: MoePermuteCall, rng: np.random.Generator, **given: Any) -> MoePermuteInputs:
        experts = rng.integers(0, call.num_experts, call.experts.shape, np.int32)
        return super().random_inputs(call, rng, **{"experts": experts, **given})

    def dimensions(self, call: MoePermuteCall) -> Mapping[str, str]:
        return {"x": "b t d", "experts": "b t k", "rows": "b m d", "group_sizes": "b e", "positions": "b t k"}

    def output_specs(self, call: MoePermuteCall) -> MoePermuteOutputs:
        batch, tokens, width = call.x.shape
        return MoePermuteOutputs(
            ArraySpec((batch, call.rows, width), call.x.dtype),
            ArraySpec((batch, call.num_experts), "int32"),
            ArraySpec((batch, tokens, call.experts.shape[2]), "int32"),
        )

    def public(self, call: MoePermuteCall) -> tuple[str, ...]:
        return ("rows", "group_sizes", "positions")

    def cost(self, call: MoePermuteCall, phase: Phase) -> Cost:
        outputs = self.output_specs(call)
        moved = call.x.nbytes + outputs.rows.nbytes + outputs.positions.nbytes
        if phase == "forward":
            return Cost(0, moved + call.experts.nbytes + outputs.group_sizes.nbytes)
        return Cost(outputs.rows.size, moved)


def check_choices(name: str, choices: Any, tokens: int) -> None:
    """Refuse what is not an integer array `[T, k]`, k >= 1."""
    check_array(name, choices, ndim=2, floating=False)
    if not jnp.issubdtype(choices.dtype, jnp.integer):
        raise wrong_type(name, f"dtype {choices.dtype}", "integers")
    check_shape(name, choices, (tokens, max(choices.shape[1], 1)), "[T, k], k >= 1")


OPERATION = MoePermute()
