"""Contract of `qk_norm_rope`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, statistics_dtype
from ejkernel.call.records import Bound, Cost
from ejkernel.errors import wrong_type
from ejkernel.operations.common.rotary.interface import RotaryCall, check_rotation, head_dims
from ejkernel.operations.common.rows.interface import check_scaling
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array


class QkNormRopeInputs(NamedTuple):
    """query and key `[b, t, h, d]`, or `[b, h, t, d]` with `heads_first`; heads may differ in number.

    cos, sin `[1 or b, t, w]`, both alike: w = `rotary_dim`, one number per channel, or w = `rotary_dim / 2`, one per pair.
    query_scale, key_scale `[1 or b, d]`.
    """

    query: Float[Array, "b _ _ d"]
    key: Float[Array, "b _ _ d"]
    cos: Float[Array, "#b t w"]
    sin: Float[Array, "#b t w"]
    query_scale: Float[Array, "#b d"] = None
    key_scale: Float[Array, "#b d"] = None


class QkNormRopeOutputs(NamedTuple):
    """query and key, in their own dtypes; residuals: 1 / sqrt(mean(x^2) + epsilon) of every head, float32 (float64 for float64),
    `[b, t, h]`, or `[b, h, t]` with `heads_first`."""

    query: Float[Array, "b _ _ d"]
    key: Float[Array, "b _ _ d"]
    query_rstd: Float[Array, "b _ _"] = None
    key_rstd: Float[Array, "b _ _"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QkNormRopeCall(RotaryCall):
    """Static facts of one `qk_norm_rope`."""

    key: ArraySpec
    query_scale: ArraySpec | None = None
    key_scale: ArraySpec | None = None
    epsilon: float = 1e-6
    scale_offset: float = 0.0


class QkNormRope(Operation):
    """`y = x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset)` of every head, then `y * cos + turn(y) * sin` on the first
    `rotary_dim` channels, of query and key alike; `turn` maps each pair (a, b) to (-b, a).

    In float32 inside: y is not rounded before it is turned.
    """

    name = "qk_norm_rope"
    Call = QkNormRopeCall
    Inputs = QkNormRopeInputs
    Outputs = QkNormRopeOutputs
    revisions = (6,)
    differentiable = ("query", "key", "cos", "sin", "query_scale", "key_scale")
    shardable = ("b", "t", "h")

    def canonicalise(
        self,
        query: Any,
        key: Any,
        cos: Any = None,
        sin: Any = None,
        query_scale: Any = None,
        key_scale: Any = None,
        *,
        epsilon: float = 1e-6,
        scale_offset: float = 0.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        layout: str = "BTHD",
    ) -> Bound:
        """Check; arrays stay as they are. Arguments as in `ejkernel.fused_qk_norm_rope`; query and key are its q and k."""
        if key is None:
            raise wrong_type("key", "None", "an array", remedy="rms_norm, then rope, are the same of one array")
        rotation = check_rotation(query, key, cos, sin, rotary_dim, interleaved, layout)
        scales = {"query_scale": query_scale, "key_scale": key_scale}
        epsilon, scale_offset = check_scaling(
            scales, (query.shape[-1],), "[head size]", epsilon, scale_offset, ("query_scale", "key_scale")
        )
        of_query, of_key = (None if scale is None else scale[None] for scale in scales.values())
        inputs = QkNormRopeInputs(rotation.query, rotation.key, rotation.cos, rotation.sin, of_query, of_key)
        call = QkNormRopeCall(
            query=ArraySpec.of(inputs.query),
            key=ArraySpec.of(inputs.key),
            query_scale=None if of_query is None else ArraySpec.of(of_query),
            key_scale=None if of_key is None else ArraySpec.of(of_key),
            epsilon=epsilon,
            scale_offset=scale_offset,
            **rotation.facts,
        )

        def finish(outputs: QkNormRopeOutputs) -> Any:
            return rotation.restored(outputs.query), rotation.restored(outputs.key)

        return Bound(call, inputs, finish)

    def dimensions(self, call: QkNormRopeCall) -> Mapping[str, str]:
        dims = head_dims(call, call.key)
        rows = {f"{name}_rstd": dims[name].removesuffix(" d") for name in ("query", "key")}
        return {**dims, **rows, "query_scale": "b? d", "key_scale": "b? d"}

    def output_specs(self, call: QkNormRopeCall) -> QkNormRopeOutputs:
        if not call.save_residuals:
            return QkNormRopeOutputs(call.query, call.key)
        return QkNormRopeOutputs(call.query, call.key, _statistics(call.query), _statistics(call.key))

    def public(self, call: QkNormRopeCall) -> tuple[str, ...]:
        return ("query", "key")

    def cost(self, call: QkNormRopeCall, phase: Phase) -> Cost:
        flops, moved = 0, call.cos.nbytes + call.sin.nbytes
        forward = phase == "forward"
        for x, scale in ((call.query, call.query_scale), (call.key, call.key_scale)):
            turned = x.size // max(x.shape[3], 1) * call.rotary_dim
            scaled, scale_bytes = (1, scale.nbytes) if scale is not None else (0, 0)
            flops += (3 + scaled) * x.size + 3 * turned if forward else (7 + 3 * scaled) * x.size + 7 * turned
            moved += 2 * x.nbytes + scale_bytes if forward else 3 * x.nbytes + 2 * scale_bytes
            moved += _statistics(x).nbytes if call.save_residuals or not forward else 0
        return Cost(flops, moved if forward else moved + call.cos.nbytes + call.sin.nbytes)


def _statistics(x: ArraySpec) -> ArraySpec:
    return ArraySpec(x.shape[:-1], statistics_dtype(x.dtype))


OPERATION = QkNormRope()
