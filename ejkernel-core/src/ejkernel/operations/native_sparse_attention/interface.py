"""Contract of `native_sparse_attention`: the selected branch, attention over the blocks that each query names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.random import positions
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common.options import as_count, as_flag
from ejkernel.operations.common.scale import scaled
from ejkernel.operations.common.selected import NOTHING, check_integers, distinct
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.flash_attention.interface import is_concrete
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.integers import as_int32


class NativeSparseAttentionInputs(NamedTuple):
    """query `[b, t, h, d]`, key `[b, t, k, d]`, value `[b, t, k, e]`; query head h reads key head `h // (h_count // k_count)`.

    block_indices int32 `[b, t, k, s]`: the blocks of a query, each at most once and none that begins after the query;
    negative entries name nothing. Block c of a query at t is the tokens
    `sequence_starts[t] + c * block_size`, ... of which it sees those up to t.
    sequence_starts int32 `[1 or b, t]`: first token of the query's own sequence; None = 0, and blocks are then aligned.
    """

    query: Float[Array, "b t h d"]
    key: Float[Array, "b t k d"]
    value: Float[Array, "b t k e"]
    block_indices: Int32[Array, "b t k s"]
    sequence_starts: Int32[Array, "#b t"] = None


class NativeSparseAttentionOutputs(NamedTuple):
    """out `[b, t, h, e]` in the query's dtype; lse `[b, t, h]` in float32 (float64 for float64), natural logarithm, -inf for a
    query without keys. lse is public when asked for and a residual otherwise."""

    out: Float[Array, "b t h e"]
    lse: Float[Array, "b t h"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeSparseAttentionCall(Call):
    """Static facts of one call.

    Attributes:
        block_size: tokens per block.
        softmax_scale: factor on `query . key`.
        return_lse: lse is a public output.
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    block_indices: ArraySpec
    sequence_starts: ArraySpec | None = None
    block_size: int
    softmax_scale: float
    return_lse: bool = False


class NativeSparseAttention(Operation):
    """`out_t = softmax over j of (scale * query_t . key_j) . value_j`, j over the tokens up to t in the blocks that t names.

    Logits, softmax and sums are kept in float32. A query that names no block gives 0, lse -inf and no gradient.
    """

    name = "native_sparse_attention"
    Call = NativeSparseAttentionCall
    Inputs = NativeSparseAttentionInputs
    Outputs = NativeSparseAttentionOutputs
    revisions = (2,)
    renamed = (("scale", "softmax_scale"),)
    differentiable = ("query", "key", "value")
    shardable = ("b", "h")
    traceable = ("softmax_scale",)

    def canonicalise(
        self,
        query: Any,
        key: Any,
        value: Any,
        block_indices: Any,
        block_counts: Any = None,
        cu_seqlens: Any = None,
        *,
        block_size: int = 64,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        is_distinct: bool = False,
    ) -> Bound:
        """Check, and reduce every list of blocks to those that count.

        Arguments as in `ejkernel.apply_native_sparse_attention`; is_distinct: no block is named twice.
        """
        bind.check_query_key_value(query, key, value)
        dtype = query.dtype
        query, key, value = bind.in_one_dtype(query, key, value)
        query, scale = scaled(query, softmax_scale, query.shape[3])
        batch, length, _, _ = query.shape
        if key.shape[1] != length:
            raise invalid("key", f"length {key.shape[1]}", f"the query's {length}")
        block_size = as_count("block_size", block_size, 1)
        check_integers("block_indices", block_indices, ndim=4)
        rows = (batch, length, key.shape[2])
        if tuple(block_indices.shape[:3]) != rows:
            raise invalid("block_indices", f"shape {tuple(block_indices.shape)}", f"[B,T,K,S] with (B, T, K) = {rows}")
        counts = _counts(block_counts, rows, block_indices.shape[3])
        starts = None if cu_seqlens is None else _sequence_starts(cu_seqlens, batch, length)
        named_blocks = _that_count(block_indices, counts, starts, block_size)
        inputs = NativeSparseAttentionInputs(
            query,
            key,
            value,
            named_blocks if as_flag("is_distinct", is_distinct) else distinct(named_blocks),
            None if starts is None else jnp.minimum(starts, max(length - 1, 0)),
        )
        call = NativeSparseAttentionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            block_size=block_size,
            softmax_scale=scale,
            return_lse=as_flag("return_lse", return_lse),
        )

        def finish(outputs: NativeSparseAttentionOutputs) -> Any:
            out = outputs.out.astype(dtype)
            return (out, outputs.lse) if return_lse else out

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        cu_seqlens, query = arrays.get("cu_seqlens"), arrays.get("query")
        if cu_seqlens is None or not is_concrete(cu_seqlens) or getattr(query, "ndim", 0) < 2:
            return
        values, length = np.asarray(cu_seqlens), query.shape[1]  # pyright: ignore[reportOptionalMemberAccess]
        if values.ndim == 1 and values.size and (values[0] != 0 or values[-1] > length or (np.diff(values) < 0).any()):
            raise invalid("cu_seqlens", values, f"values that do not decrease, from 0 to at most {length} = length of query")

    def random_inputs(
        self, call: NativeSparseAttentionCall, rng: np.random.Generator, **given: Any
    ) -> NativeSparseAttentionInputs:
        """The last blocks up to the query's own."""
        own = np.arange(call.query.shape[1])[None, :, None, None] // call.block_size
        known: dict[str, Any] = {"block_indices": (own - positions(call.block_indices)).astype(np.int32)}
        if call.sequence_starts is not None:
            known["sequence_starts"] = np.zeros(call.sequence_starts.shape, np.int32)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: NativeSparseAttentionCall) -> Mapping[str, str]:
        return {
            "query": "b t h d",
            "key": "b t h d",
            "value": "b t h v",
            "block_indices": "b t h s",
            "sequence_starts": "b? t",
            "out": "b t h v",
            "lse": "b t h",
        }

    def time(self, call: NativeSparseAttentionCall) -> Mapping[str, int]:
        return {"t": 0}

    def output_specs(self, call: NativeSparseAttentionCall) -> NativeSparseAttentionOutputs:
        rows = call.query.shape[:3]
        out = ArraySpec((*rows, call.value.shape[3]), call.query.dtype)
        wanted = call.return_lse or call.save_residuals
        return NativeSparseAttentionOutputs(out, ArraySpec(rows, statistics_dtype(call.query.dtype)) if wanted else None)

    def public(self, call: NativeSparseAttentionCall) -> tuple[str, ...]:
        return ("out", "lse") if call.return_lse else ("out",)

    def cost(self, call: NativeSparseAttentionCall, phase: Phase) -> Cost:
        """Of queries that each name as many blocks as they can, in one sequence; how many they do name is known at run time."""
        batch, length, heads, head_size = call.query.shape
        most = call.block_indices.shape[3] * call.block_size
        short = min(length, most)
        pairs = short * (short + 1) // 2 + (length - short) * most
        products = 2 * batch * heads * pairs * (head_size + call.value.shape[3])
        read = sum(spec.nbytes for spec in (call.query, call.key, call.value, call.block_indices))
        outputs = [spec.nbytes for _, spec in named(self.output_specs(call))]
        if phase == "forward":
            return Cost(products, read + sum(outputs))
        gradients = sum(spec.nbytes for spec in (call.query, call.key, call.value))
        return Cost(products * 5 // 2, read + sum(outputs) + sum(outputs[: len(self.public(call))]) + gradients)


def _counts(block_counts: Any, rows: tuple[int, int, int], slots: int) -> Any:
    """None, an int or an array `[B,T,K]`."""
    if block_counts is None:
        return None
    if not hasattr(block_counts, "dtype") or getattr(block_counts, "ndim", 0) == 0:
        return min(as_count("block_counts", block_counts, 0), slots)
    check_integers("block_counts", block_counts)
    if tuple(block_counts.shape) != rows:
        raise invalid("block_counts", f"shape {tuple(block_counts.shape)}", f"an int, or [B,T,K] = {rows}")
    most = min(slots, jnp.iinfo(block_counts.dtype).max)
    return jnp.minimum(jnp.asarray(block_counts), jnp.asarray(most, block_counts.dtype)).astype(jnp.int32)


def _sequence_starts(cu_seqlens: Any, batch: int, length: int) -> Any:
    """First token of every token's sequence `[1, t]`; `length` past the last sequence."""
    check_integers("cu_seqlens", cu_seqlens, ndim=1)
    if cu_seqlens.shape[0] < 1:
        raise invalid("cu_seqlens", "no element", "[n + 1], so at least one")
    if batch != 1:
        raise invalid("query", f"batch {batch}", "batch 1 with cu_seqlens", remedy="pack the sequences along T")
    bounds = as_int32(cu_seqlens)
    tokens = jnp.arange(length, dtype=jnp.int32)
    starts = bounds[jnp.maximum(jnp.searchsorted(bounds, tokens, side="right").astype(jnp.int32) - 1, 0)]
    return jnp.where(tokens < bounds[-1], starts, length)[None]


def _that_count(block_indices: Any, counts: Any, starts: Any, block_size: int) -> Any:
    """int32 indices with `NOTHING` in place of those that are negative, in the future or not counted."""
    length, slots = block_indices.shape[1], block_indices.shape[3]
    position = jnp.arange(length, dtype=jnp.int32)[None]
    position = position if starts is None else position - starts
    # Compared as block numbers, not as tokens: `block_indices * block_size` could overflow.
    last = jnp.where(position < 0, NOTHING, position // block_size)[:, :, None, None]
    block_indices = jnp.asarray(block_indices).astype(jnp.int32)  # what int32 cannot hold is negative, and far in the future
    counted = (block_indices >= 0) & (block_indices <= last)
    slot = jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, 1, slots)
    if isinstance(counts, int):
        counted &= slot < counts
    elif counts is not None:
        counted &= slot < counts[..., None]
    return jnp.where(counted, as_int32(block_indices), NOTHING)


OPERATION = NativeSparseAttention()
