"""Contract of `delta_rule`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.random import cumulative, segments
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.packed import as_bounds, check_bounds, check_packed, check_segments
from ejkernel.operations.common.scale import output_scale
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape
from ejkernel.utils.integers import as_int32

NORM_EPSILON = 1e-6
"""Added to the squared length of query and key where they are normalised."""


class DeltaRuleInputs(NamedTuple):
    """Arrays with their canonical dims.

    query, key `[b, t, h, d]`, value `[b, t, h, v]`; beta `[b, t, h]` or None (ones); decay, a logarithm, `[b, t, h]` or
    `[b, t, h, d]` or None (zeros); a, b `[b, t, h, d]` or None (see `DeltaRule`); initial_state `[b, n, H, d, v]` or None
    (zeros). seg_ids int32 `[1 or b, t]`; cu_seqlens int32 `[1 or b, n + 1]`, n = 1 without. The axis h has H heads, or K
    heads that H / K consecutive heads share; initial_state always has H.
    """

    query: Float[Array, "b t _ d"]
    key: Float[Array, "b t _ d"]
    value: Float[Array, "b t _ v"]
    beta: Float[Array, "b t _"] = None
    decay: Float[Array, "b t ..."] = None
    a: Float[Array, "b t _ d"] = None
    b: Float[Array, "b t _ d"] = None
    initial_state: Float[Array, "b n h d v"] = None
    seg_ids: Int32[Array, "#b t"] = None
    cu_seqlens: Int32[Array, "#b boundaries"] = None


class DeltaRuleOutputs(NamedTuple):
    """out `[b, t, H, v]` in the dtype of value; final_state `[b, n, H, d, v]`, float32 (float64 for float64), with
    return_state. There is no residual: the backward phase recomputes."""

    out: Float[Array, "b t h v"]
    final_state: Float[Array, "b n h d v"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRuleCall(Call):
    """Static facts.

    Attributes:
        softmax_scale: factor of the output.
        use_qk_l2norm: query and key are divided by their lengths, `sqrt(sum x^2 + NORM_EPSILON)`, first.
        use_chunked: many tokens at once, by matrix products, where that is faster; else token after token; the same numbers.
        reverse: every sequence runs from its last token to its first.
        return_state: final_state is wanted.
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    beta: ArraySpec | None = None
    decay: ArraySpec | None = None
    a: ArraySpec | None = None
    b: ArraySpec | None = None
    initial_state: ArraySpec | None = None
    seg_ids: ArraySpec | None = None
    cu_seqlens: ArraySpec | None = None
    softmax_scale: float = 1.0
    use_qk_l2norm: bool = False
    use_chunked: bool = True
    reverse: bool = False
    return_state: bool = False

    @property
    def heads(self) -> int:
        """H, the number of states of each sequence."""
        return max(self.query.shape[2], self.key.shape[2], self.value.shape[2])

    @property
    def sequences(self) -> int:
        """n."""
        return 1 if self.cu_seqlens is None else self.cu_seqlens.shape[1] - 1

    @property
    def decays_by_channel(self) -> bool:
        """Whether every key channel has a decay of its own."""
        return self.decay is not None and len(self.decay.shape) == 4

    @property
    def state_dtype(self) -> str:
        return statistics_dtype(self.value.dtype)


class DeltaRule(Operation):
    """For every head a state S `[d, v]`, in float32; for every token, in order,

        S <- diag(exp(decay)) S + a (b^T S) + beta k v^T
        out = scale * S^T q

    with the old S in `b^T S`. Without a it is `-beta k`; without b it is `exp(decay) k`. Without both this is the delta rule:
    S is decayed, then `k (beta (v - S^T k))^T` is added, so that S^T k moves from what it was towards v by the share beta
    of the difference. With both it is the general diagonal matrix plus one of rank 1 (RWKV-7).

    Tokens of a segment id below 0 take no part, whatever they hold: their out is 0 and the state passes them unchanged. The
    state becomes 0 before a token whose id is not that of the last token that took part. Tokens past the last of cu_seqlens
    take no part.
    """

    name = "delta_rule"
    Call = DeltaRuleCall
    Inputs = DeltaRuleInputs
    Outputs = DeltaRuleOutputs
    revisions = (12,)
    renamed = (("scale", "softmax_scale"), ("chunked", "use_chunked"), ("segments", "seg_ids"))
    differentiable = ("query", "key", "value", "beta", "decay", "a", "b", "initial_state")
    shardable = ("b", "h")
    traceable = ("softmax_scale",)

    def canonicalise(
        self,
        query: Any,
        key: Any,
        value: Any,
        beta: Any = None,
        decay: Any = None,
        initial_state: Any = None,
        a: Any = None,
        b: Any = None,
        seg_ids: Any = None,
        cu_seqlens: Any = None,
        *,
        softmax_scale: float | None = None,
        use_qk_l2norm: bool = False,
        use_chunked: bool = True,
        reverse: bool = False,
        return_state: bool = False,
    ) -> Bound:
        """Check; give the states an axis of sequences.

        Args:
            query, key: `[B,T,K,D]`; the numbers of heads of query, key and value divide the largest of them, H.
            value: `[B,T,K,V]`, of the dtype of query and key.
            beta: `[B,T,K]`, K divides H.
            decay: natural logarithm of the factor of the state, `[B,T,K]` or `[B,T,K,D]`.
            initial_state: `[B,H,D,V]`; `[n,H,D,V]` with cu_seqlens.
            a, b: `[B,T,K,D]`.
            seg_ids: integers `[B,T]` or `[1,T]`; below 0 is padding.
            cu_seqlens: integers `[n + 1]`, not decreasing, from 0 to at most T, with B = 1.
            softmax_scale: None = `1 / sqrt(D)`. Traced, it multiplies the output after the operation.
            use_qk_l2norm, use_chunked, reverse, return_state: as in `DeltaRuleCall`.
        """
        flags: Any = {
            "use_qk_l2norm": use_qk_l2norm,
            "use_chunked": use_chunked,
            "reverse": reverse,
            "return_state": return_state,
        }
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise wrong_type(name, repr(flag), "a bool")
        arrays = {"query": query, "key": key, "value": value, "beta": beta, "decay": decay, "a": a, "b": b}
        _check_tokens({name: array for name, array in arrays.items() if array is not None})
        batch, length, _, width = query.shape
        heads = max(query.shape[2], key.shape[2], value.shape[2])
        if cu_seqlens is not None:
            check_packed(cu_seqlens, "query", batch)
            if seg_ids is not None:
                raise invalid(
                    "seg_ids", "an array", "None beside cu_seqlens", remedy="say with one of them where sequences end"
                )
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if initial_state is not None:
            check_compute("initial_state", initial_state)
            expected = (sequences, heads, width, value.shape[-1])
            check_shape("initial_state", initial_state, expected, "[sequences, heads, channels of key, channels of value]")
        if seg_ids is not None:
            check_segments(seg_ids, batch, length)
        state_dtype = statistics_dtype(jnp.dtype(value.dtype).name)
        inputs = DeltaRuleInputs(
            **arrays,
            initial_state=None
            if initial_state is None
            else jnp.expand_dims(initial_state, 1 if cu_seqlens is None else 0).astype(state_dtype),
            seg_ids=None if seg_ids is None else as_int32(seg_ids),
            cu_seqlens=None if cu_seqlens is None else as_bounds(cu_seqlens),
        )
        specs: Any = {name: ArraySpec.of(array) for name, array in named(inputs)}
        factor, multiply = output_scale(softmax_scale, width, query.dtype)
        call = DeltaRuleCall(**specs, softmax_scale=factor, **flags)

        def finish(outputs: DeltaRuleOutputs) -> Any:
            out = multiply(outputs.out)
            if not return_state:
                return out
            return out, outputs.final_state[:, 0] if cu_seqlens is None else outputs.final_state[0]

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_bounds(arrays.get("cu_seqlens"), "query", arrays.get("query"))

    def random_inputs(self, call: DeltaRuleCall, rng: np.random.Generator, **given: Any) -> DeltaRuleInputs:
        """Decays a little below 0, keys of length 1, as models have them."""
        known: dict[str, Any] = {}
        for name in ("decay",):
            if (spec := getattr(call, name)) is not None:
                known[name] = (-0.1 * rng.random(spec.shape, np.float32)).astype(jnp.dtype(spec.dtype))
        for name in ("key", "a", "b"):
            if (spec := getattr(call, name)) is not None:
                drawn = rng.standard_normal(spec.shape, np.float32)
                known[name] = (drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).astype(jnp.dtype(spec.dtype))
        if call.cu_seqlens is not None:
            known["cu_seqlens"] = cumulative(rng, call.cu_seqlens, call.query.shape[1])
        if call.seg_ids is not None:
            known["seg_ids"] = segments(call.seg_ids)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: DeltaRuleCall) -> Mapping[str, str]:
        return {
            **dict.fromkeys(("query", "key", "a", "b"), "b t h d"),
            "value": "b t h v",
            "beta": "b t h",
            "decay": "b t h d" if call.decays_by_channel else "b t h",
            "initial_state": "b n h d v",
            "seg_ids": "b? t",
            "cu_seqlens": "b? s",
            "out": "b t h v",
            "final_state": "b n h d v",
        }

    def time(self, call: DeltaRuleCall) -> Mapping[str, int]:
        return {"t": 0}

    def output_specs(self, call: DeltaRuleCall) -> DeltaRuleOutputs:
        batch, length, _, width = call.query.shape
        channels = call.value.shape[3]
        state = ArraySpec((batch, call.sequences, call.heads, width, channels), call.state_dtype)
        out = ArraySpec((batch, length, call.heads, channels), call.value.dtype)
        return DeltaRuleOutputs(out, state if call.return_state else None)

    def public(self, call: DeltaRuleCall) -> tuple[str, ...]:
        return ("out", "final_state") if call.return_state else ("out",)

    def cost(self, call: DeltaRuleCall, phase: Phase) -> Cost:
        """Of the recurrence itself, all tokens taking part: reading S twice and adding to it once or twice per token."""
        out, state = self.output_specs(dataclasses.replace(call, return_state=True))
        products = 4 if call.a is not None else 3
        decays = 0 if call.decay is None else 1
        flops = (2 * products + decays) * out.size * call.query.shape[3]
        arrays = [spec for spec in (getattr(call, name) for name in self.Inputs._fields) if spec is not None]
        states = state.nbytes if call.return_state else 0
        moved = sum(spec.nbytes for spec in arrays) + out.nbytes + states
        if phase == "forward":
            return Cost(flops, moved)
        gradients = sum(getattr(call, name).nbytes for name in self.differentiable if getattr(call, name) is not None)
        return Cost(flops * 5 // 2, moved + gradients)


def _check_tokens(arrays: Mapping[str, Any]) -> None:
    """Batch, length, heads, channels and dtypes of the arrays that have a length."""
    for name in ("query", "key", "value"):
        check_compute(name, arrays[name], ndim=4)
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    heads = max(array.shape[2] for array in (query, key, value))
    batch, length, _, width = query.shape
    widths = {"beta": (), "value": (value.shape[3],)}
    for name, array in arrays.items():
        check_compute(name, array)
        trailing = widths.get(name, (width,))
        shapes = [(batch, length, array.shape[2] if array.ndim > 2 else heads, *trailing)]
        if name == "decay":
            shapes.append(shapes[0][:3])
        if tuple(array.shape) not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise invalid(name, f"shape {tuple(array.shape)}", f"{expected}, with batch, length and channels of query")
        if array.shape[2] < 1 or heads % array.shape[2]:
            raise invalid(
                name, f"{array.shape[2]} heads", f"a number that divides {heads}, the most heads of query, key, value"
            )
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            raise wrong_type(name, f"dtype {array.dtype}", f"{query.dtype}, the dtype of query")


OPERATION = DeltaRule()
