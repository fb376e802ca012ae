"""Contract of `linear_recurrence`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.random import cumulative
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.options import as_precision
from ejkernel.operations.common.packed import as_bounds, check_bounds, check_packed
from ejkernel.operations.common.scale import output_scale
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape
from ejkernel.utils.tracing import is_traced


class LinearRecurrenceInputs(NamedTuple):
    """Arrays with their canonical dims.

    query, key `[b, t, h, d]`, value `[b, t, h, v]`; log decays g `[b, t, h]`, g_gamma `[1 or b, h]`, gk `[b, t, h, d]`,
    gv `[b, t, h, v]`; bonus `[1 or b, h, d]`; value_scale `[b, t, h]`; skip `[1 or b, h, 1 or v]`; initial_state
    `[b, n, H, d, v]`, or `[b, n, H, v, d]` with transposed_state; cu_seqlens int32 `[1 or b, n + 1]`, n = 1 without. The axis h
    has H heads, or K heads that H / K consecutive heads share; only initial_state always has H.
    """

    query: Float[Array, "b t _ d"]
    key: Float[Array, "b t _ d"]
    value: Float[Array, "b t _ v"]
    g: Float[Array, "b t _"] = None
    g_gamma: Float[Array, "#b _"] = None
    gk: Float[Array, "b t _ d"] = None
    gv: Float[Array, "b t _ v"] = None
    bonus: Float[Array, "#b _ d"] = None
    value_scale: Float[Array, "b t _"] = None
    skip: Float[Array, "#b _ #v"] = None
    initial_state: Float[Array, "b n h _ _"] = None
    cu_seqlens: Int32[Array, "#b boundaries"] = None


class LinearRecurrenceOutputs(NamedTuple):
    """out `[b, t, H, v]` in the dtype of value; final_state like initial_state, float32 (float64 for float64), with return_state.
    There is no residual."""

    out: Float[Array, "b t h v"]
    final_state: Float[Array, "b n h _ _"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRecurrenceCall(Call):
    """Static facts.

    Attributes:
        softmax_scale: factor of what is read from the state.
        reverse: every sequence runs from its last token to its first.
        return_state: final_state is wanted.
        transposed_state: states are `[b, n, H, v, d]`, as state-space models keep them.
        precision: of the products: None (full precision of the inputs' common dtype), or "default", "high", "highest".
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    g: ArraySpec | None = None
    g_gamma: ArraySpec | None = None
    gk: ArraySpec | None = None
    gv: ArraySpec | None = None
    bonus: ArraySpec | None = None
    value_scale: ArraySpec | None = None
    skip: ArraySpec | None = None
    initial_state: ArraySpec | None = None
    cu_seqlens: ArraySpec | None = None
    softmax_scale: float = 1.0
    reverse: bool = False
    return_state: bool = False
    transposed_state: bool = False
    precision: str | None = None

    @property
    def heads(self) -> tuple[int, int]:
        """K and H: the fewest and the most heads that query, key and value have."""
        found = [spec.shape[2] for spec in (self.query, self.key, self.value)]
        return min(found), max(found)

    @property
    def sequences(self) -> int:
        """n: how many states each member of the batch has."""
        return 1 if self.cu_seqlens is None else self.cu_seqlens.shape[1] - 1

    @property
    def state_dtype(self) -> str:
        return "float64" if "float64" in (self.query.dtype, self.key.dtype, self.value.dtype) else "float32"

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of a head's state: channels of key and of value, or the other way round."""
        width, channels = self.query.shape[3], self.value.shape[3]
        return (channels, width) if self.transposed_state else (width, channels)


class LinearRecurrence(Operation):
    """`S_t = exp(g_t + g_gamma) diag(exp gk_t) S_(t-1) diag(exp gv_t) + k_t v_t^T`, `o_t = scale S_t^T q_t`.

    With a bonus, `o_t = scale (S_(t-1) + diag(bonus) k_t v_t^T)^T q_t`. With a value_scale, `value_scale_t v_t` takes the place
    of v_t there; a skip adds `skip v_t` to o_t, v_t without the value_scale. States are float32. Tokens outside of every sequence
    take no part, whatever they hold: their outputs and gradients are 0.
    """

    name = "linear_recurrence"
    Call = LinearRecurrenceCall
    Inputs = LinearRecurrenceInputs
    Outputs = LinearRecurrenceOutputs
    revisions = (11, ("value_scale", "skip", "transposed_state"))
    renamed = (("scale", "softmax_scale"),)
    differentiable = ("query", "key", "value", "g", "g_gamma", "gk", "gv", "bonus", "value_scale", "skip", "initial_state")
    shardable = ("b", "h")
    traceable = ("softmax_scale",)

    def canonicalise(
        self,
        query: Any,
        key: Any,
        value: Any,
        g: Any = None,
        g_gamma: Any = None,
        gk: Any = None,
        gv: Any = None,
        bonus: Any = None,
        value_scale: Any = None,
        skip: Any = None,
        initial_state: Any = None,
        cu_seqlens: Any = None,
        *,
        softmax_scale: float | None = None,
        reverse: bool = False,
        return_state: bool = False,
        transposed_state: bool = False,
        precision: Any = None,
    ) -> Bound:
        """Check and bring the state to `[B, n, H, D, V]`, or `[B, n, H, V, D]` with transposed_state.

        Arguments as in `ejkernel.recurrent_attention`. bonus: weight of the token itself `[heads,D]`; None: the state after the
        token is read. value_scale `[B,T,heads]`: factor of the value, as the step size of a state-space model. skip `[heads]` or
        `[heads,V]`: how much of the value itself the output takes; beside it softmax_scale is not traced. Every array has H or K
        heads, the most and the fewest of query, key and value.
        """
        for name, flag in (("reverse", reverse), ("return_state", return_state), ("transposed_state", transposed_state)):
            if not isinstance(flag, bool):
                raise wrong_type(name, repr(flag), "a bool")
        for name, array in (("query", query), ("key", key), ("value", value)):
            check_compute(name, array, ndim=4)
        batch, length, _, width = query.shape
        _check_like_query("key", key, query)
        _check_like_query("value", value, query, channels=False)
        heads = _check_heads(query, key, value)
        channels = value.shape[3]
        trailing = {"g": (), "gk": (width,), "gv": (channels,), "value_scale": ()}
        for name, array in (("g", g), ("gk", gk), ("gv", gv), ("value_scale", value_scale)):
            if array is not None:
                check_compute(name, array, ndim=3 + len(trailing[name]))
                _check_shared(name, array, (batch, length), heads, trailing[name])
        if g_gamma is not None:
            check_compute("g_gamma", g_gamma)
            if g_gamma.ndim == 1:
                g_gamma = g_gamma[None]
            _check_shared("g_gamma", g_gamma, (g_gamma.shape[0],) if g_gamma.shape[:1] == (1,) else (batch,), heads, ())
        if bonus is not None:
            check_compute("bonus", bonus, ndim=2)
            _check_shared("bonus", bonus, (), heads, (width,))
        if skip is not None:
            check_compute("skip", skip)
            _check_shared("skip", skip, (), heads, (channels,) if skip.ndim == 2 else ())
            if is_traced(softmax_scale):
                remedy = "multiply the query, or add skip times value to the output"
                raise invalid("softmax_scale", "a traced number", "a concrete one beside skip", remedy=remedy)
        if cu_seqlens is not None:
            check_packed(cu_seqlens, "query", batch)
        if initial_state is not None:
            count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
            check_compute("initial_state", initial_state)
            sizes, meaning = ((channels, width), "H, V, D") if transposed_state else ((width, channels), "H, D, V")
            meaning = f"[B, {meaning}]" if cu_seqlens is None else f"[n, {meaning}]"
            check_shape("initial_state", initial_state, (count, heads[1], *sizes), meaning)
        packed = cu_seqlens is not None
        inputs = LinearRecurrenceInputs(
            query,
            key,
            value,
            g,
            g_gamma,
            gk,
            gv,
            None if bonus is None else bonus[None],
            value_scale,
            None if skip is None else skip.reshape(1, skip.shape[0], channels if skip.ndim == 2 else 1),
            None if initial_state is None else initial_state[None] if packed else initial_state[:, None],
            as_bounds(cu_seqlens) if packed else None,
        )
        specs: dict[str, Any] = {name: ArraySpec.of(array) for name, array in named(inputs)}
        factor, multiply = output_scale(softmax_scale, width, query.dtype)
        call = LinearRecurrenceCall(
            **specs,
            softmax_scale=factor,
            reverse=reverse,
            return_state=return_state,
            transposed_state=transposed_state,
            precision=as_precision(precision),
        )

        def finish(outputs: LinearRecurrenceOutputs) -> Any:
            out = multiply(outputs.out)
            if not return_state:
                return out
            return out, outputs.final_state[0] if packed else outputs.final_state[:, 0]

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        check_bounds(arrays.get("cu_seqlens"), "query", arrays.get("query"))

    def random_inputs(self, call: LinearRecurrenceCall, rng: np.random.Generator, **given: Any) -> LinearRecurrenceInputs:
        """Decays a little below 0, as models have them."""
        known: dict[str, Any] = {}
        for name in ("g", "g_gamma", "gk", "gv"):
            if (spec := getattr(call, name)) is not None:
                known[name] = (-0.1 * rng.random(spec.shape, np.float32)).astype(jnp.dtype(spec.dtype))
        if call.cu_seqlens is not None:
            known["cu_seqlens"] = cumulative(rng, call.cu_seqlens, call.query.shape[1])
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: LinearRecurrenceCall) -> Mapping[str, str]:
        state = "b n h v d" if call.transposed_state else "b n h d v"
        return {
            "query": "b t h d",
            "key": "b t h d",
            "value": "b t h v",
            "g": "b t h",
            "g_gamma": "b? h",
            "gk": "b t h d",
            "gv": "b t h v",
            "bonus": "b? h d",
            "value_scale": "b t h",
            "skip": "b? h v?",
            "initial_state": state,
            "cu_seqlens": "b? s",
            "out": "b t h v",
            "final_state": state,
        }

    def time(self, call: LinearRecurrenceCall) -> Mapping[str, int]:
        return {"t": 0}

    def output_specs(self, call: LinearRecurrenceCall) -> LinearRecurrenceOutputs:
        (batch, length), heads, channels = call.query.shape[:2], call.heads[1], call.value.shape[3]
        state = ArraySpec((batch, call.sequences, heads, *call.state_shape), call.state_dtype)
        out = ArraySpec((batch, length, heads, channels), call.value.dtype)
        return LinearRecurrenceOutputs(out, state if call.return_state else None)

    def public(self, call: LinearRecurrenceCall) -> tuple[str, ...]:
        return ("out", "final_state") if call.return_state else ("out",)

    def cost(self, call: LinearRecurrenceCall, phase: Phase) -> Cost:
        """Of the recurrence itself: one product to write the state, one to read it; the gradient takes five."""
        out, state = self.output_specs(call)
        flops = 2 * out.size * call.query.shape[3]
        read = sum(spec.nbytes for spec in vars(call).values() if isinstance(spec, ArraySpec))
        if phase == "forward":
            return Cost(2 * flops, read + out.nbytes + (0 if state is None else state.nbytes))
        return Cost(5 * flops, 2 * read + out.nbytes + (0 if state is None else state.nbytes))


def _check_like_query(name: str, array: Any, query: Any, *, channels: bool = True) -> None:
    got, wanted = array.shape, query.shape
    if got[:2] != wanted[:2] or (channels and got[3] != wanted[3]):
        expected = f"batch {wanted[0]}, length {wanted[1]}" + (f" and {wanted[3]} channels" if channels else "")
        raise invalid(name, f"shape {tuple(got)}", f"{expected} as query")


def _check_heads(query: Any, key: Any, value: Any) -> tuple[int, int]:
    """The fewest and the most heads."""
    found = {"query": query.shape[2], "key": key.shape[2], "value": value.shape[2]}
    fewest, most = min(found.values()), max(found.values())
    if fewest == 0 or most % fewest:
        raise invalid("key", f"{found} heads", f"the fewest, {fewest}, to divide the most, {most}")
    for name, heads in found.items():
        if heads not in (fewest, most):
            raise invalid(name, f"{heads} heads", f"{fewest} or {most}, as the others")
    return fewest, most


def _check_shared(name: str, array: Any, leading: tuple[int, ...], heads: tuple[int, int], trailing: tuple[int, ...]) -> None:
    """Refuse an array that is not `[*leading, H or K, *trailing]`."""
    allowed = [(*leading, count, *trailing) for count in dict.fromkeys(reversed(heads))]
    if tuple(array.shape) not in allowed:
        raise invalid(name, f"shape {tuple(array.shape)}", " or ".join(map(str, allowed)))


OPERATION = LinearRecurrence()
