"""Contract of `flash_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Float32, Int32, UInt32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.random import positions, segments
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common.options import as_flag, as_precision, as_soft_cap
from ejkernel.operations.common.scale import scaled
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.flash_attention.dropout import as_dropout_rate, check_dropout_streams, streams_of_seed
from ejkernel.operations.flash_attention.pairs import count_pairs
from ejkernel.operations.flash_attention.score_functions.functions import Functions
from ejkernel.operations.flash_attention.score_functions.named import with_named
from ejkernel.operations.flash_attention.score_functions.record import ScoreFunction
from ejkernel.operations.flash_attention.visibility import TracedLimits, Visibility
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array


class FlashAttentionInputs(NamedTuple):
    """Canonical arrays. Query head h reads key head h // (H // K).

    query `[B, T, H, D]`; key `[B, S, K, D]`; value `[B, S, K, V]`; bias floating and mask bool (True = visible), both
    `[B|1, H|1, T|1, S|1]`, where a bias of -inf hides the pair; segments and positions int32 `[B|1, T]` and `[B|1, S]`: a pair is
    visible only if its segments are equal and not negative; positions replace indices in causal, window and chunk masks; sinks
    `[B|1, H, n]`: logits that take part in the denominator only; dropout_streams uint32 `[B, H, 2]`, see `dropout`.

    Of score functions: mod_values float32 or float64 `[B|1, n]` and mod_integers int32 `[B|1, m]`, the numbers of the arrays that
    they read, see `Capture`; batch_index, head_index, query_index and key_index int32, what they are told of each score. Absent,
    a query and a key stand at their places in the arrays; the others are there where a function asks for them.
    """

    query: Float[Array, "b t h d"]
    key: Float[Array, "b s k d"]
    value: Float[Array, "b s k v"]
    bias: Float[Array, "#b #h #t #s"] = None
    mask: Bool[Array, "#b #h #t #s"] = None
    query_segments: Int32[Array, "#b t"] = None
    key_segments: Int32[Array, "#b s"] = None
    query_positions: Int32[Array, "#b t"] = None
    key_positions: Int32[Array, "#b s"] = None
    softmax_aux: Float[Array, "#b h n"] = None
    dropout_streams: UInt32[Array, "b h 2"] = None
    mod_values: Float[Array, "#b n"] = None
    mod_integers: Int32[Array, "#b m"] = None
    batch_index: Int32[Array, " b"] = None
    head_index: Int32[Array, "#b h"] = None
    query_index: Int32[Array, "#b t"] = None
    key_index: Int32[Array, "#b s"] = None


class FlashAttentionOutputs(NamedTuple):
    """out `[B, T, H, V]` in the query's dtype; lse float32 `[B, T, H]`, natural log, sinks included, -inf for a row that sees
    nothing. lse is public when asked for and a residual otherwise."""

    out: Float[Array, "b t h v"]
    lse: Float32[Array, "b t h"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashAttentionCall(Call):
    """Static facts. Query i sits at position `i + query_offset` and key j at position j unless position arrays are given.

    Attributes:
        softmax_scale: factor on `query . key`.
        causal: a key is visible up to the query's position.
        query_offset: position of query 0; S - T for bottom-right alignment.
        window: `(left, right)`: keys at most `left` positions before and `right` after the query, inclusive; None = unlimited.
        chunk_size: only keys of the query's own chunk of this many positions are visible.
        prefix: keys at positions below it are exempt from `causal`.
        logits_soft_cap: c in `c * tanh(logits / c)`, after scale and bias, before masks.
        dropout_rate: probability of dropping each attention weight; survivors are divided by `1 - dropout_rate`.
        normalize_output: False returns `sum_j exp(L_ij - m_i) v_j`, m_i the row's largest logit (sinks included), held constant
            under differentiation.
        logits_dtype: `query . key` is rounded to this dtype before anything else is done with it.
        precision: of both products: None (full precision of the inputs' dtype), or "default", "high", "highest".
        return_lse: lse is a public output.
        score_mod: what becomes of each score, after scale, bias and cap, before masks; -inf hides the pair.
        mask_mod: which pairs are visible, besides everything else that says so.
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    bias: ArraySpec | None = None
    mask: ArraySpec | None = None
    query_segments: ArraySpec | None = None
    key_segments: ArraySpec | None = None
    query_positions: ArraySpec | None = None
    key_positions: ArraySpec | None = None
    softmax_aux: ArraySpec | None = None
    dropout_streams: ArraySpec | None = None
    mod_values: ArraySpec | None = None
    mod_integers: ArraySpec | None = None
    batch_index: ArraySpec | None = None
    head_index: ArraySpec | None = None
    query_index: ArraySpec | None = None
    key_index: ArraySpec | None = None
    softmax_scale: float
    causal: bool = False
    query_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    prefix: int | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    normalize_output: bool = True
    logits_dtype: str = "float32"
    precision: str | None = None
    return_lse: bool = False
    score_mod: ScoreFunction | None = None
    mask_mod: ScoreFunction | None = None

    @property
    def window_width(self) -> int | None:
        """Most keys that the window lets a query see; None where it does not bound them."""
        left, right = self.window or (None, None)
        right = 0 if self.causal and self.prefix is None else right
        return None if left is None or right is None else left + right + 1


_FUNCTIONS = (
    *("score_mod", "mask_mod", "mod_values", "mod_integers"),
    *("batch_index", "head_index", "query_index", "key_index"),
)


class FlashAttention(Operation):
    """`out = softmax(mask(score_mod(cap(scale * query . key + bias))), sinks) . value`, with float32 logits, softmax and sums."""

    name = "flash_attention"
    Call = FlashAttentionCall
    Inputs = FlashAttentionInputs
    Outputs = FlashAttentionOutputs
    revisions = (19, _FUNCTIONS)
    brought = dict.fromkeys(_FUNCTIONS[2:], _FUNCTIONS[:2])
    renamed = (("scale", "softmax_scale"), ("soft_cap", "logits_soft_cap"), ("sinks", "softmax_aux"))
    differentiable = ("query", "key", "value", "bias", "softmax_aux", "mod_values")
    shardable = ("b", "h")
    traceable = ("softmax_scale", "sliding_window", "chunk_size")

    def canonicalise(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        softmax_aux: Any = None,
        mask_info: Any = None,
        mask: Any = None,
        query_segments: Any = None,
        key_segments: Any = None,
        query_positions: Any = None,
        key_positions: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
        dropout_seed: Any = None,
        dropout_streams: Any = None,
        mod_inputs: Any = None,
        mod_values: Any = None,
        mod_integers: Any = None,
        batch_index: Any = None,
        head_index: Any = None,
        query_index: Any = None,
        key_index: Any = None,
        alibi_slopes: Any = None,
        forget_gate: Any = None,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_alignment: str | None = None,
        sliding_window: Any = None,
        chunk_size: int | None = None,
        prefix: int | None = None,
        logits_soft_cap: float | None = None,
        dropout_prob: float = 0.0,
        broadcast_dropout: bool = False,
        normalize_output: bool = True,
        logits_dtype: Any = "float32",
        precision: Any = None,
        return_lse: bool = False,
        score_mod: Any = None,
        mask_mod: Any = None,
    ) -> Bound:
        """Check the arguments and combine everything said about visibility by AND.

        Args:
            query: `[B, T, H, D]`.
            key: `[B, S, K, D]`, H a multiple of K. The call is in the widest dtype of the three, if it holds the others' numbers;
                the result in the query's.
            value: `[B, S, K, V]`.
            bias: floating `[B|1, H|1, T|1, S|1]` or `[T|1, S|1]`.
            softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`.
            mask_info: a `MaskInfo`.
            mask: bool, True = visible, shaped like bias.
            query_segments, key_segments: int `[B|1, T]`, `[B|1, S]`; equal segments see each other, negative ones nothing;
                one side alone only marks padding.
            query_positions, key_positions: int `[B|1, T]`, `[B|1, S]`, in place of indices.
            query_lengths, key_lengths: int `[B|1]`; tokens from there on are padding.
            dropout_seed: int, integer scalar or PRNG key.
            dropout_streams: uint32 `[B, H, 2]` in place of a seed, for shards of a larger problem.
            mod_inputs: pytree of arrays that score_mod and mask_mod get last.
            mod_values, mod_integers: numbers of functions that are traced already.
            batch_index, head_index, query_index, key_index: what functions are told, for shards of a larger problem.
            alibi_slopes: `[H]` or `[B|1, H]`; forget_gate: `[B|1, H, S]`; see `named`.
            softmax_scale: None means `1 / sqrt(D)`; traced, the query is multiplied by it, see `scaled`.
            causal_alignment: "top_left" (also what None means): query 0 at position 0; "bottom_right": at S - T.
            sliding_window: `(left, right)`, inclusive; an int w means (w, w). A traced side, like a traced chunk_size, becomes part
                of the mask.
            chunk_size: only keys of the query's own chunk are visible.
            dropout_prob: in [0, 1).
            broadcast_dropout: the same entries of all rows and heads.
            logits_dtype: "float32" keeps the products as accumulated; a smaller dtype rounds them.
            score_mod, mask_mod: Python functions, or traced ones.
            causal, prefix, logits_soft_cap, normalize_output, precision, return_lse: as in `FlashAttentionCall`.
        """
        bind.check_query_key_value(query, key, value)
        dtype = query.dtype
        query, key, value = bind.in_one_dtype(query, key, value)
        batch, queries, heads, head_size = query.shape
        keys = key.shape[1]
        sizes = (batch, heads, queries, keys)
        query, scale = scaled(query, softmax_scale, head_size)
        limits, sliding_window, chunk_size = TracedLimits.taken_from(sliding_window, chunk_size)
        said = Visibility(
            mask=mask,
            query_segments=query_segments,
            key_segments=key_segments,
            query_positions=query_positions,
            key_positions=key_positions,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            causal=causal,
            window=sliding_window,
            chunk_size=chunk_size,
            prefix=prefix,
        )
        seen = said.checked(sizes) & Visibility.of_mask_info(mask_info).checked(sizes)
        seen = seen.aligned(causal_alignment, queries, keys).limited(limits, queries, keys)
        seen = seen.with_padding_as_segments(queries, keys)
        functions = Functions.given(score_mod, mask_mod, mod_inputs, mod_values, mod_integers, query.dtype)
        functions = with_named(
            functions,
            seen,
            sizes,
            query.dtype,
            alibi_slopes=alibi_slopes,
            forget_gate=forget_gate,
            batch_index=batch_index,
        )
        seen = seen.simplified()
        rate = as_dropout_rate(dropout_prob)
        if dropout_streams is not None and rate:
            check_dropout_streams(dropout_streams, batch, heads)
        elif dropout_streams is None:
            same = as_flag("broadcast_dropout", broadcast_dropout)
            dropout_streams = streams_of_seed(rate, dropout_seed, batch, heads, same=same)
        inputs = FlashAttentionInputs(
            query=query,
            key=key,
            value=value,
            bias=None if bias is None else bind.as_bias(bias, sizes),
            mask=seen.mask,
            query_segments=seen.query_segments,
            key_segments=seen.key_segments,
            query_positions=seen.query_positions,
            key_positions=seen.key_positions,
            softmax_aux=bind.as_sinks(softmax_aux, heads),
            dropout_streams=dropout_streams if rate else None,
            **functions.inputs(
                sizes, batch_index=batch_index, head_index=head_index, query_index=query_index, key_index=key_index
            ),
        )
        call = FlashAttentionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            softmax_scale=scale,
            causal=seen.causal,
            query_offset=seen.query_offset,
            window=seen.window,
            chunk_size=seen.chunk_size,
            prefix=seen.prefix,
            logits_soft_cap=as_soft_cap(logits_soft_cap),
            dropout_rate=rate,
            normalize_output=as_flag("normalize_output", normalize_output),
            logits_dtype=bind.as_logits_dtype(logits_dtype, query.dtype),
            precision=as_precision(precision),
            return_lse=as_flag("return_lse", return_lse),
            score_mod=functions.score_mod,
            mask_mod=functions.mask_mod,
        )

        def finish(outputs: FlashAttentionOutputs) -> Any:
            out = outputs.out.astype(dtype)
            return (out, outputs.lse) if return_lse else out

        return Bound(call, inputs, finish)

    def random_inputs(self, call: FlashAttentionCall, rng: np.random.Generator, **given: Any) -> FlashAttentionInputs:
        """Four packed sequences where there are segments, half of the pairs where there is a dense mask."""
        rules: dict[str, Callable[[ArraySpec], Any]] = {
            "mask": lambda spec: rng.random(spec.shape) < 0.5,
            "query_segments": segments,
            "key_segments": segments,
            "query_positions": positions,
            "key_positions": positions,
            "dropout_streams": lambda spec: rng.integers(0, 2**32, spec.shape, np.uint32),
            "mod_integers": lambda spec: np.zeros(spec.shape, np.int32),
            **{f"{name}_index": _counted for name in ("batch", "head", "query", "key")},
        }
        known = {name: rule(getattr(call, name)) for name, rule in rules.items() if getattr(call, name) is not None}
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: FlashAttentionCall) -> Mapping[str, str]:
        return {
            "query": "b t h d",
            "key": "b s h d",
            "value": "b s h v",
            "bias": "b? h? t? s?",
            "mask": "b? h? t? s?",
            "query_segments": "b? t",
            "key_segments": "b? s",
            "query_positions": "b? t",
            "key_positions": "b? s",
            "softmax_aux": "b? h n",
            "dropout_streams": "b h w",
            "mod_values": "b? n",
            "mod_integers": "b? m",
            "batch_index": "b",
            "head_index": "b? h",
            "query_index": "b? t",
            "key_index": "b? s",
            "out": "b t h v",
            "lse": "b t h",
        }

    def time(self, call: FlashAttentionCall) -> Mapping[str, int] | None:
        by_index = call.query_positions is None and call.key_positions is None
        return {"t": call.query_offset, "s": 0} if call.causal and call.prefix is None and by_index else None

    def output_specs(self, call: FlashAttentionCall) -> FlashAttentionOutputs:
        rows = call.query.shape[:3]
        out = ArraySpec((*rows, call.value.shape[3]), call.query.dtype)
        return FlashAttentionOutputs(out, ArraySpec(rows, "float32") if call.return_lse or call.save_residuals else None)

    def public(self, call: FlashAttentionCall) -> tuple[str, ...]:
        return ("out", "lse") if call.return_lse else ("out",)

    def cost(self, call: FlashAttentionCall, phase: Phase) -> Cost:
        batch, _, heads, head_size = call.query.shape
        products = 2 * batch * heads * count_pairs(call) * (head_size + call.value.shape[3])
        arrays = {name: spec for name in FlashAttentionInputs._fields if (spec := getattr(call, name)) is not None}
        read = sum(spec.nbytes for spec in arrays.values())
        outputs = [spec.nbytes for _, spec in named(self.output_specs(call))]
        if phase == "forward":
            return Cost(products, read + sum(outputs))
        gradients = sum(spec.nbytes for name, spec in arrays.items() if name in self.differentiable)
        cotangents = sum(outputs[: len(self.public(call))])
        return Cost(products * 5 // 2, read + sum(outputs) + cotangents + gradients)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        """Lengths that are known must lie within the arrays that they describe."""
        for name, owner in (("query_lengths", "query"), ("key_lengths", "key")):
            lengths = arrays.get(name)
            if lengths is not None and is_concrete(lengths):
                size = arrays[owner].shape[-3]
                values = np.asarray(lengths)
                if values.size and not (values.min() >= 0 and values.max() <= size):
                    raise invalid(name, values.tolist(), f"values in [0, {size}]")


def _counted(spec: ArraySpec) -> Any:
    """Indices in order."""
    return np.broadcast_to(np.arange(spec.shape[-1], dtype=np.int32), spec.shape)


def is_concrete(array: Any) -> bool:
    """Whether the values of an array can be read here and now."""
    if isinstance(array, jax.Array):
        return not isinstance(array, Tracer) and array.is_fully_addressable
    return isinstance(array, np.ndarray)


OPERATION = FlashAttention()
