"""Contract of `sparse_latent_attention`: latent attention over the tokens that each query names."""

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
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.options import as_count, as_flag
from ejkernel.operations.common.scale import scaled
from ejkernel.operations.common.selected import NOTHING, check_integers, distinct
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute
from ejkernel.utils.integers import as_int32


class SparseLatentAttentionInputs(NamedTuple):
    """query `[b, t, h, c]`; key_value `[b, s, c]`, shared by the heads, whose first value_size channels are the values too;
    token_indices int32 `[b, t, k]`: the tokens of key_value that a query sees, each at most once; negative ones name nothing."""

    query: Float[Array, "b t h c"]
    key_value: Float[Array, "b s c"]
    token_indices: Int32[Array, "b t k"]


class SparseLatentAttentionOutputs(NamedTuple):
    """out `[b, t, h, v]` in the query's dtype; lse `[b, t, h]` in float32 (float64 for float64), natural logarithm, -inf for a
    query without tokens. lse is public when asked for and a residual otherwise."""

    out: Float[Array, "b t h v"]
    lse: Float[Array, "b t h"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLatentAttentionCall(Call):
    """Static facts of one call.

    Attributes:
        value_size: channels of key_value that are values.
        softmax_scale: factor on `query . key_value`.
        return_lse: lse is a public output.
    """

    query: ArraySpec
    key_value: ArraySpec
    token_indices: ArraySpec
    value_size: int
    softmax_scale: float
    return_lse: bool = False


class SparseLatentAttention(Operation):
    """`out_t = softmax over j of (scale * query_t . c_j) . c_j[:value_size]`, c = key_value, j over the tokens that t names.

    Multi-head latent attention in its absorbed form, where all heads read one latent. Logits, softmax and sums are kept in
    float32. A query that names no token gives 0, lse -inf and no gradient. Causal is what the indices make it.
    """

    name = "sparse_latent_attention"
    Call = SparseLatentAttentionCall
    Inputs = SparseLatentAttentionInputs
    Outputs = SparseLatentAttentionOutputs
    revisions = (1,)
    renamed = (("scale", "softmax_scale"),)
    differentiable = ("query", "key_value")
    shardable = ("b", "h")
    traceable = ("softmax_scale",)

    def canonicalise(
        self,
        query: Any,
        key_value: Any,
        token_indices: Any,
        *,
        value_size: int | None = None,
        softmax_scale: float | None = None,
        return_lse: bool = False,
        is_distinct: bool = False,
    ) -> Bound:
        """Check, and reduce every list of tokens to those that exist.

        Args:
            query: `[B,T,H,C]`, floating.
            key_value: `[B,S,C]`.
            token_indices: integers `[B,T,k]`. Numbers outside of [0, S) name nothing; a token named twice counts once.
            value_size: channels that are values, at most C; None = all.
            softmax_scale: None = `1 / sqrt(C)`.
            return_lse: return `(out, lse)`.
            is_distinct: nothing is named twice, so nothing need be done about it.
        """
        check_compute("query", query, ndim=4)
        check_compute("key_value", key_value, ndim=3)
        batch, length, heads, size = query.shape
        if key_value.dtype != query.dtype:
            raise wrong_type("key_value", f"dtype {key_value.dtype}", f"the query's dtype {query.dtype}")
        if key_value.shape[0] != batch or key_value.shape[2] != size:
            raise invalid("key_value", f"shape {tuple(key_value.shape)}", f"[{batch}, S, {size}] as the query")
        if not heads or not size:
            raise invalid("query", f"shape {tuple(query.shape)}", "at least one head and one channel")
        check_integers("token_indices", token_indices, ndim=3)
        if tuple(token_indices.shape[:2]) != (batch, length):
            raise invalid("token_indices", f"shape {tuple(token_indices.shape)}", f"[B,T,k] with (B, T) = {(batch, length)}")
        values = size if value_size is None else as_count("value_size", value_size, 1)
        if values > size:
            raise invalid("value_size", values, f"at most {size}, the channels of key_value")
        exists = (token_indices >= 0) & (token_indices < key_value.shape[1])
        tokens = jnp.where(exists, as_int32(token_indices), NOTHING)
        query, scale = scaled(query, softmax_scale, size)
        inputs = SparseLatentAttentionInputs(
            query, key_value, tokens if as_flag("is_distinct", is_distinct) else distinct(tokens)
        )
        call = SparseLatentAttentionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            value_size=values,
            softmax_scale=scale,
            return_lse=as_flag("return_lse", return_lse),
        )

        def finish(outputs: SparseLatentAttentionOutputs) -> Any:
            return (outputs.out, outputs.lse) if return_lse else outputs.out

        return Bound(call, inputs, finish)

    def random_inputs(
        self, call: SparseLatentAttentionCall, rng: np.random.Generator, **given: Any
    ) -> SparseLatentAttentionInputs:
        """The tokens up to the query's own, counted back."""
        indices = np.arange(call.query.shape[1])[None, :, None] - positions(call.token_indices)
        indices = np.where(indices < call.key_value.shape[1], indices, -1)
        return super().random_inputs(call, rng, **{"token_indices": indices.astype(np.int32), **given})

    def dimensions(self, call: SparseLatentAttentionCall) -> Mapping[str, str]:
        return {
            "query": "b t h d",
            "key_value": "b s d",
            "token_indices": "b t k",
            "out": "b t h v",
            "lse": "b t h",
        }

    def output_specs(self, call: SparseLatentAttentionCall) -> SparseLatentAttentionOutputs:
        rows = call.query.shape[:3]
        wanted = call.return_lse or call.save_residuals
        lse = ArraySpec(rows, statistics_dtype(call.query.dtype)) if wanted else None
        return SparseLatentAttentionOutputs(ArraySpec((*rows, call.value_size), call.query.dtype), lse)

    def public(self, call: SparseLatentAttentionCall) -> tuple[str, ...]:
        return ("out", "lse") if call.return_lse else ("out",)

    def cost(self, call: SparseLatentAttentionCall, phase: Phase) -> Cost:
        """Of queries that name as many tokens as they can; how many they do name is known at run time."""
        size = call.query.shape[3]
        products = 2 * call.token_indices.size * call.query.shape[2] * (size + call.value_size)
        read = sum(spec.nbytes for spec in (call.query, call.key_value, call.token_indices))
        outputs = [spec.nbytes for _, spec in named(self.output_specs(call))]
        if phase == "forward":
            return Cost(products, read + sum(outputs))
        gradients = call.query.nbytes + call.key_value.nbytes
        return Cost(products * 5 // 2, read + sum(outputs) + sum(outputs[: len(self.public(call))]) + gradients)


OPERATION = SparseLatentAttention()
