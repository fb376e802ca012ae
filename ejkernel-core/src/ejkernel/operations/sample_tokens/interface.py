"""Contract of `sample_tokens`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, UInt32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.matrices import matrices, rows_as_given
from ejkernel.operations.sample_tokens.noise import row_streams
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import without_gradient

NO_TOKEN = -1
"""Of a row with a NaN, or without a token that may be drawn."""
_RANGES = {"temperature": (0.0, np.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}


class SampleTokensInputs(NamedTuple):
    """logits `[b, n, v]`; streams `[1 or b, 1 or n, 2]`; token_mask bool, each axis as in logits or 1: True = may be drawn.

    temperature, top_p, min_p float32 and top_k int32, `[1 or b, 1 or n]`. A temperature of at most 0 means the first of the
    largest logits. A top_k below 1, a top_p of at least 1 and a min_p of at most 0 keep every token.
    """

    logits: Float[Array, "b n v"]
    streams: UInt32[Array, "#b #n 2"]
    temperature: Float32[Array, "#b #n"]
    top_k: Int32[Array, "#b #n"] = None
    top_p: Float32[Array, "#b #n"] = None
    min_p: Float32[Array, "#b #n"] = None
    token_mask: Bool[Array, "#b #n #v"] = None


class SampleTokensOutputs(NamedTuple):
    """tokens int32 `[b, n]`; logprobs float32 `[b, n]` with `return_logprobs`. There is no residual."""

    tokens: Int32[Array, "b n"]
    logprobs: Float32[Array, "b n"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleTokensCall(Call):
    """Static facts: `static_top_k`, below v, is that of every row, and stands in the place of `top_k`."""

    logits: ArraySpec
    streams: ArraySpec
    temperature: ArraySpec
    top_k: ArraySpec | None = None
    top_p: ArraySpec | None = None
    min_p: ArraySpec | None = None
    token_mask: ArraySpec | None = None
    static_top_k: int | None = None
    return_logprobs: bool = False


class SampleTokens(Operation):
    """Draw i with probability `w_i / sum_j w_j`, j over the tokens that are kept, `w_i = exp((x_i - max x) / temperature)`.

    Kept is i if fewer than top_k of x are larger than x_i; and if, among those, `sum_j w_j` of the larger ones is below top_p
    times that of all, or x_i is the largest; and if `w_i >= min_p`. So tokens that are equal are kept or dropped together.

    In float32 inside. A row with a NaN among the logits that token_mask admits, in temperature, top_p or min_p, and one
    without a logit above -inf, gives `NO_TOKEN` and the log-probability NaN. +inf shares the probability with its equals.
    """

    name = "sample_tokens"
    Call = SampleTokensCall
    Inputs = SampleTokensInputs
    Outputs = SampleTokensOutputs
    revisions = (6,)
    differentiable = ()
    shardable = ("b", "n")

    def canonicalise(
        self,
        logits: Any,
        key: Any,
        temperature: Any = 1.0,
        top_k: Any = None,
        top_p: Any = None,
        min_p: Any = None,
        token_mask: Any = None,
        *,
        static_top_k: int | None = None,
        return_logprobs: bool = False,
    ) -> Bound:
        """Check and add the batch axis. Arguments as in `ejkernel.sample_tokens`; an int as its top_k is `static_top_k`."""
        check_compute("logits", logits)
        if logits.ndim == 0 or logits.shape[-1] == 0:
            raise invalid("logits", f"shape {tuple(logits.shape)}", "[..., V] with V of at least 1")
        if not isinstance(return_logprobs, bool):
            raise wrong_type("return_logprobs", repr(return_logprobs), "a bool")
        rows, size = tuple(logits.shape[:-1]), logits.shape[-1]
        if static_top_k is not None and static_top_k >= size:
            static_top_k = None
        streams = row_streams(key, rows)
        if token_mask is not None:
            _check_mask(token_mask, tuple(logits.shape))
            token_mask = token_mask.reshape((1,) * (logits.ndim - token_mask.ndim) + token_mask.shape)
            if len(rows) > 2:
                token_mask = jnp.broadcast_to(token_mask, (*rows, token_mask.shape[-1]))
            token_mask = matrices(token_mask, 1)
        inputs = SampleTokensInputs(
            logits=without_gradient("logits", matrices(logits, 1)),
            streams=matrices(streams, 1),
            temperature=_per_row("temperature", temperature, rows),
            top_k=None if top_k is None else _counts(top_k, rows),
            top_p=None if top_p is None else _per_row("top_p", top_p, rows),
            min_p=None if min_p is None else _per_row("min_p", min_p, rows),
            token_mask=token_mask,
        )
        call = SampleTokensCall(
            **{name: ArraySpec.of(value) for name, value in named(inputs)},  # pyright: ignore[reportArgumentType]
            static_top_k=static_top_k,
            return_logprobs=return_logprobs,
        )

        def finish(outputs: SampleTokensOutputs) -> Any:
            tokens, logprobs = (None if value is None else rows_as_given(value[..., None], rows)[..., 0] for value in outputs)
            return (tokens, logprobs) if return_logprobs else tokens

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        """Of numbers and NumPy arrays; those of JAX would have to be waited for."""
        for name, (least, most) in _RANGES.items():
            value = arrays.get(name)
            if isinstance(value, (int, float, np.generic, np.ndarray)) and not np.all(
                np.greater_equal(value, least) & np.less_equal(value, most)  # not so of NaN
            ):
                raise invalid(name, value, f"{'a value' if np.ndim(value) == 0 else 'values'} in [{least:g}, {most:g}]")

    def random_inputs(self, call: SampleTokensCall, rng: np.random.Generator, **given: Any) -> SampleTokensInputs:
        """Temperatures of 1, half of the tokens, nine tenths of the probability; half of the places are masked."""
        known: dict[str, Any] = {
            "streams": rng.integers(0, 2**32, call.streams.shape, np.uint32),
            "temperature": np.ones(call.temperature.shape, np.float32),
        }
        if call.top_k is not None:
            known["top_k"] = np.full(call.top_k.shape, max(call.logits.shape[2] // 2, 1), np.int32)
        for name, value in (("top_p", 0.9), ("min_p", 0.01)):
            spec = getattr(call, name)
            if spec is not None:
                known[name] = np.full(spec.shape, value, np.float32)
        if call.token_mask is not None:
            known["token_mask"] = rng.random(call.token_mask.shape) < 0.5
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: SampleTokensCall) -> Mapping[str, str]:
        per_row = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), "b? n?")
        mask = {"token_mask": "b? n? v?"}
        return {"logits": "b n v", "streams": "b? n? w", **per_row, **mask, "tokens": "b n", "logprobs": "b n"}

    def output_specs(self, call: SampleTokensCall) -> SampleTokensOutputs:
        rows = call.logits.shape[:2]
        return SampleTokensOutputs(ArraySpec(rows, "int32"), ArraySpec(rows, "float32") if call.return_logprobs else None)

    def public(self, call: SampleTokensCall) -> tuple[str, ...]:
        return ("tokens", "logprobs") if call.return_logprobs else ("tokens",)

    def cost(self, call: SampleTokensCall, phase: Phase) -> Cost:
        """Of one pass; what a search for thresholds reads again is not counted."""
        if phase == "backward":
            return Cost(0, 0)
        given = (call.logits, call.streams, call.temperature, call.top_k, call.top_p, call.min_p, call.token_mask)
        results = [spec.nbytes for spec in self.output_specs(call) if spec is not None]
        return Cost(8 * call.logits.size, sum(spec.nbytes for spec in given if spec is not None) + sum(results))


def _check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    check_array("token_mask", mask, floating=False)
    if mask.dtype != bool:
        raise wrong_type("token_mask", f"dtype {mask.dtype}", "bool", remedy="True marks the tokens that may be drawn")
    aligned = shape[len(shape) - mask.ndim :]
    if mask.ndim > len(shape) or any(size not in (1, full) for size, full in zip(mask.shape, aligned, strict=True)):
        raise invalid("token_mask", f"shape {tuple(mask.shape)}", f"a shape that broadcasts to {shape} = logits")


def _per_row(name: str, value: Any, rows: tuple[int, ...]) -> Any:
    value = jnp.asarray(value)
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise wrong_type(name, f"dtype {value.dtype}", "a real number, or one for each row")
    if value.shape not in ((), rows):
        raise invalid(name, f"shape {tuple(value.shape)}", f"one number, or {rows} = [...] of logits")
    return without_gradient(name, matrices(value.astype(jnp.float32), 0))


def _counts(value: Any, rows: tuple[int, ...]) -> Any:
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, jnp.integer):
        raise wrong_type("top_k", str(getattr(value, "dtype", repr(value))), "an int, or integers, one for each row")
    if value.shape not in ((), rows):
        raise invalid("top_k", f"shape {tuple(value.shape)}", f"one integer, or {rows} = [...] of logits")
    return matrices(as_int32(value), 0)


OPERATION = SampleTokens()
