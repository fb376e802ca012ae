"""Contract of `native_sparse_selection`: which blocks of keys each query of native sparse attention reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.random import positions
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.scale import as_scale
from ejkernel.operations.common.selected import check_integers
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape, integer
from ejkernel.utils.integers import as_int32

LARGEST = 2.0**124
"""Sums of weights count as that at most: twice, four and eight times as much is for the blocks that are always selected."""


class NativeSparseSelectionInputs(NamedTuple):
    """query `[b, t, h, d]`; means `[b, n, k, d]` of blocks of keys, in the query's dtype; lse `[b, t, h]` of compressed attention,
    in float32 (float64 of float64).

    own_blocks int32 `[1 or b, t]`: the query's own block, counted from the first of its sequence; negative for no sequence.
    first_blocks int32 `[1 or b, t]`: that first block among the n; None = 0. block_counts int32 `[b, t, k]`: how many blocks are
    selected, `count` at most; None = `count`.
    """

    query: Float[Array, "b t h d"]
    means: Float[Array, "b n k d"]
    lse: Float[Array, "b t h"]
    own_blocks: Int32[Array, "#b t"]
    first_blocks: Int32[Array, "#b t"] = None
    block_counts: Int32[Array, "b t k"] = None


class NativeSparseSelectionOutputs(NamedTuple):
    """blocks int32 `[b, t, k, c]`, counted from the first of the query's sequence, ascending, then -1 where there are fewer."""

    blocks: Int32[Array, "b t k c"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeSparseSelectionCall(Call):
    """Static facts: `count`, at most n, is how many blocks a query reads; `softmax_scale` is the factor on `query . mean`."""

    query: ArraySpec
    means: ArraySpec
    lse: ArraySpec
    own_blocks: ArraySpec
    first_blocks: ArraySpec | None = None
    block_counts: ArraySpec | None = None
    count: int
    softmax_scale: float


class NativeSparseSelection(Operation):
    """The query's own block, the one before it, the first, and then those before them with the largest
    `sum_h exp(scale * query[t,h] . mean[n] - lse[t,h])`, over the query heads h of a key head.

    Of equal sums the earlier block is selected; a weight that is NaN counts as 0. Products and sums are float32. There is no
    gradient. Source: Yuan et al., Native Sparse Attention, 2025, section 3.3.2.
    """

    name = "native_sparse_selection"
    Call = NativeSparseSelectionCall
    Inputs = NativeSparseSelectionInputs
    Outputs = NativeSparseSelectionOutputs
    revisions = (2,)
    renamed = (("scale", "softmax_scale"),)
    differentiable = ()
    shardable = ("b", "h")

    def canonicalise(
        self,
        query: Any,
        means: Any,
        lse: Any,
        own_blocks: Any,
        first_blocks: Any = None,
        block_counts: Any = None,
        *,
        count: int,
        softmax_scale: float | None = None,
    ) -> Bound:
        """Check.

        Args:
            query: `[B,T,H,D]`, floating.
            means: `[B,N,K,D]` in the query's dtype; query head h reads key head `h // (H // K)`.
            lse: `[B,T,H]`, floating: of attention over the means of complete blocks, so that no weight is above 1.
            own_blocks: integers `[1 or B,T]`.
            first_blocks: integers `[1 or B,T]`, or None for 0.
            block_counts: integers `[B,T,K]`, or None for count.
            count: blocks of each query, at most N.
            softmax_scale: factor on the products; None = `1 / sqrt(D)`.
        """
        check_compute("query", query, ndim=4)
        check_array("means", means, ndim=4)
        check_compute("lse", lse, ndim=3)
        batch, length, heads, size = query.shape
        entries, key_heads = means.shape[1:3]
        if means.dtype != query.dtype:
            raise wrong_type("means", f"dtype {means.dtype}", f"the query's dtype {query.dtype}")
        check_shape("means", means, (batch, entries, key_heads, size), "[B,N,K,D]")
        if key_heads == 0 or heads % key_heads:
            raise invalid("query", f"{heads} heads", f"a multiple of the {key_heads} key heads")
        check_shape("lse", lse, (batch, length, heads), "[B,T,H]")
        for name, array in (("own_blocks", own_blocks), ("first_blocks", first_blocks)):
            if array is not None:
                check_integers(name, array, ndim=2)
                if tuple(array.shape) not in ((1, length), (batch, length)):
                    raise invalid(name, f"shape {tuple(array.shape)}", f"[1 or B,T] with (B, T) = {(batch, length)}")
        if block_counts is not None:
            check_integers("block_counts", block_counts, ndim=3)
            check_shape("block_counts", block_counts, (batch, length, key_heads), "[B,T,K]")
        count = integer("count", count, 0)
        if count > entries:
            raise invalid("count", count, f"at most {entries} = N, the blocks of means")
        query, means, lse = jax.lax.stop_gradient((query, means, lse))
        inputs = NativeSparseSelectionInputs(
            query,
            means,
            lse.astype(statistics_dtype(str(query.dtype))),
            jnp.clip(as_int32(own_blocks), -1, entries - 1),
            None if first_blocks is None else jnp.clip(as_int32(first_blocks), 0, entries),
            None if block_counts is None else jnp.clip(as_int32(block_counts), 0, count),
        )
        call = NativeSparseSelectionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            count=count,
            softmax_scale=as_scale(softmax_scale, size),
        )
        return Bound(call, inputs, lambda outputs: outputs.blocks)

    def random_inputs(
        self, call: NativeSparseSelectionCall, rng: np.random.Generator, **given: Any
    ) -> NativeSparseSelectionInputs:
        """Blocks of one length, and weights that are below 1."""
        entries, length = call.means.shape[1], call.query.shape[1]
        own = positions(call.own_blocks) * entries // max(length, 1)
        known: dict[str, Any] = {"own_blocks": own.astype(np.int32)}
        known["lse"] = np.full(call.lse.shape, np.log(entries + 1) + 1, call.lse.dtype)
        if call.first_blocks is not None:
            known["first_blocks"] = np.zeros(call.first_blocks.shape, np.int32)
        if call.block_counts is not None:
            known["block_counts"] = np.full(call.block_counts.shape, call.count, np.int32)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: NativeSparseSelectionCall) -> Mapping[str, str]:
        return {
            "query": "b t h d",
            "means": "b n h d",
            "lse": "b t h",
            "own_blocks": "b? t",
            "first_blocks": "b? t",
            "block_counts": "b t h",
            "blocks": "b t h c",
        }

    def output_specs(self, call: NativeSparseSelectionCall) -> NativeSparseSelectionOutputs:
        return NativeSparseSelectionOutputs(ArraySpec((*call.query.shape[:2], call.means.shape[2], call.count), "int32"))

    def public(self, call: NativeSparseSelectionCall) -> tuple[str, ...]:
        return ("blocks",)

    def cost(self, call: NativeSparseSelectionCall, phase: Phase) -> Cost:
        """Of queries that see all blocks; how many they do see is known at run time."""
        if phase == "backward":
            return Cost(0, 0)
        given = (call.query, call.means, call.lse, call.own_blocks, call.first_blocks, call.block_counts)
        moved = sum(spec.nbytes for spec in (*given, self.output_specs(call).blocks) if spec is not None)
        return Cost(2 * call.query.size * call.means.shape[1], moved)


OPERATION = NativeSparseSelection()
