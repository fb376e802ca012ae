"""Contract of `moe_route`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape, finite_number, integer

SCORINGS = ("softmax", "sigmoid")
TINY = 1e-20
"""Added to the sum by which sigmoid scores are divided, as in DeepSeek-V3: all of them may be 0."""


class MoeRouteInputs(NamedTuple):
    """logits `[b, t, e]`; bias `[1 or b, e]`."""

    logits: Float[Array, "b t e"]
    bias: Float[Array, "#b e"] = None


class MoeRouteOutputs(NamedTuple):
    """weights `[b, t, k]` in float32 (float64 of float64) and experts int32 `[b, t, k]`. Backward reads experts."""

    weights: Float[Array, "b t k"]
    experts: Int32[Array, "b t k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeRouteCall(Call):
    """Static facts.

    Attributes:
        k: experts of a token.
        scoring: "softmax" or "sigmoid".
        num_groups: groups of e / num_groups consecutive experts.
        top_groups: groups that a token may choose from; below num_groups, or both are 1.
        normalize: weights of a token sum to scale.
        scale: factor on the weights.
    """

    logits: ArraySpec
    bias: ArraySpec | None = None
    k: int
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0


class MoeRoute(Operation):
    """The k experts of each token with the largest `score + bias`, and the scores of these as weights.

    `score = softmax(logits)` or `sigmoid(logits)`, in float32. Without a bias logits are compared. With groups a token chooses
    from its top_groups best ones alone; a group is worth its largest `score + bias` (softmax) or the sum of its two largest
    (sigmoid). Of equals the lowest index comes first; NaN is above all, and in the weights. What is left out by -inf is never
    chosen: where there are fewer than k others, experts are -1 and weights 0.
    """

    name = "moe_route"
    Call = MoeRouteCall
    Inputs = MoeRouteInputs
    Outputs = MoeRouteOutputs
    revisions = (6,)
    differentiable = ("logits",)
    shardable = ("b", "t")

    def canonicalise(
        self,
        logits: Any,
        bias: Any = None,
        *,
        k: int,
        scoring: str = "softmax",
        num_groups: int = 1,
        top_groups: int | None = None,
        normalize: bool = True,
        scale: float = 1.0,
    ) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.moe_route`."""
        check_compute("logits", logits, ndim=2)
        experts = logits.shape[1]
        if bias is not None:
            check_compute("bias", bias)
            check_shape("bias", bias, (experts,), "[E]")
        if scoring not in SCORINGS:
            raise invalid("scoring", repr(scoring), "'softmax' or 'sigmoid'")
        if not isinstance(normalize, bool):
            raise wrong_type("normalize", repr(normalize), "a bool")
        count = integer("k", k, 1)
        groups = integer("num_groups", num_groups, 1)
        if experts % groups:
            raise invalid("num_groups", groups, f"a divisor of {experts} = E")
        top = groups if top_groups is None else integer("top_groups", top_groups, 1)
        if top > groups:
            raise invalid("top_groups", top, f"at most num_groups = {groups}")
        if count > top * (experts // groups):
            of = f" in {top} of {groups} groups" if top < groups else ""
            raise invalid("k", count, f"at most {top * (experts // groups)}, the experts{of}")
        inputs = MoeRouteInputs(logits[None], None if bias is None else bias[None])
        call = MoeRouteCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            k=count,
            scoring=scoring,
            num_groups=groups if top < groups else 1,
            top_groups=top if top < groups else 1,
            normalize=normalize,
            scale=finite_number("scale", scale),
        )
        return Bound(call, inputs, lambda outputs: (outputs.weights[0], outputs.experts[0]))

    def dimensions(self, call: MoeRouteCall) -> Mapping[str, str]:
        return {"logits": "b t e", "bias": "b? e", "weights": "b t k", "experts": "b t k"}

    def output_specs(self, call: MoeRouteCall) -> MoeRouteOutputs:
        chosen = (*call.logits.shape[:2], call.k)
        return MoeRouteOutputs(ArraySpec(chosen, statistics_dtype(call.logits.dtype)), ArraySpec(chosen, "int32"))

    def public(self, call: MoeRouteCall) -> tuple[str, ...]:
        return ("weights", "experts")

    def cost(self, call: MoeRouteCall, phase: Phase) -> Cost:
        """A score and k comparisons per logit; the gradient forms the scores again."""
        outputs = self.output_specs(call)
        moved = call.logits.nbytes + (0 if call.bias is None else call.bias.nbytes)
        chosen = outputs.weights.nbytes + outputs.experts.nbytes
        if phase == "forward":
            return Cost((5 + call.k) * call.logits.size, moved + chosen)
        return Cost(8 * call.logits.size, 2 * moved + chosen)


OPERATION = MoeRoute()
