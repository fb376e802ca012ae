"""Contract of `rope`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Cost
from ejkernel.operations.common.rotary.interface import RotaryCall, check_rotation, head_dims
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array


class RopeInputs(NamedTuple):
    """query and key `[b, t, h, d]`, or `[b, h, t, d]` with `heads_first`; heads may differ in number.

    cos, sin `[1 or b, t, w]`, both alike: w = `rotary_dim`, one number per channel, or w = `rotary_dim / 2`, one per pair.
    """

    query: Float[Array, "b _ _ _"]
    key: Float[Array, "b _ _ _"] = None
    cos: Float[Array, "#b t w"] = None
    sin: Float[Array, "#b t w"] = None


class RopeOutputs(NamedTuple):
    """query and key, rotated, in their own dtypes. There is no residual."""

    query: Float[Array, "b _ _ _"]
    key: Float[Array, "b _ _ _"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeCall(RotaryCall):
    """Static facts of one `rope`."""

    key: ArraySpec | None = None


class Rope(Operation):
    """`out = x * cos + turn(x) * sin` on the first `rotary_dim` channels; `turn` maps each pair (a, b) to (-b, a).

    In float32 inside. With cos and sin of an angle per pair this rotates each pair by that angle.
    """

    name = "rope"
    Call = RopeCall
    Inputs = RopeInputs
    Outputs = RopeOutputs
    revisions = (3,)
    differentiable = ("query", "key", "cos", "sin")
    shardable = ("b", "t", "h")

    def canonicalise(
        self,
        query: Any,
        key: Any = None,
        cos: Any = None,
        sin: Any = None,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        layout: str = "BTHD",
    ) -> Bound:
        """Check; arrays stay as they are. Arguments as in `ejkernel.rope`: query is its x, and key another one or None."""
        rotation = check_rotation(query, key, cos, sin, rotary_dim, interleaved, layout)
        inputs = RopeInputs(rotation.query, rotation.key, rotation.cos, rotation.sin)
        call = RopeCall(
            query=ArraySpec.of(inputs.query), key=None if key is None else ArraySpec.of(inputs.key), **rotation.facts
        )

        def finish(outputs: RopeOutputs) -> Any:
            turned = rotation.restored(outputs.query)
            return turned if key is None else (turned, rotation.restored(outputs.key))

        return Bound(call, inputs, finish)

    def dimensions(self, call: RopeCall) -> Mapping[str, str]:
        return head_dims(call, call.key)

    def output_specs(self, call: RopeCall) -> RopeOutputs:
        return RopeOutputs(call.query, call.key)

    def public(self, call: RopeCall) -> tuple[str, ...]:
        return ("query",) if call.key is None else ("query", "key")

    def cost(self, call: RopeCall, phase: Phase) -> Cost:
        rotated = [spec for spec in (call.query, call.key) if spec is not None]
        count = sum(spec.size // max(spec.shape[-1], 1) for spec in rotated) * call.rotary_dim
        array_bytes, angle_bytes = sum(spec.nbytes for spec in rotated), call.cos.nbytes + call.sin.nbytes
        if phase == "forward":
            return Cost(3 * count, 2 * array_bytes + angle_bytes)
        return Cost(7 * count, 3 * array_bytes + 2 * angle_bytes)


OPERATION = Rope()
