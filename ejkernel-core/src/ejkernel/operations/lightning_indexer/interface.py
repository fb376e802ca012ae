"""Contract of `lightning_indexer`: which tokens each query of sparse attention reads."""

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
from ejkernel.operations.common.pages import check_row_lengths
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape, integer
from ejkernel.utils.integers import as_int32

FLOAT8 = "float8_e4m3fn"
NO_TOKEN = -1


class LightningIndexerInputs(NamedTuple):
    """query `[b, t, h, d]` and key `[b, s, d]`, both in one floating dtype or both in float8_e4m3fn; weights `[b, t, h]` in float32
    (float64 of float64); ends int32 `[b, t]`, in [0, s]: a query sees the tokens before it; key_scale float32 `[b, s]`."""

    query: Float[Array, "b t h d"]
    key: Float[Array, "b s d"]
    weights: Float[Array, "b t h"]
    ends: Int32[Array, "b t"]
    key_scale: Float[Array, "b s"] = None


class LightningIndexerOutputs(NamedTuple):
    """tokens int32 `[b, t, k]`, ascending, then -1 where a query sees fewer than k."""

    tokens: Int32[Array, "b t k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LightningIndexerCall(Call):
    """Static facts: `k`, from 1 to s where there are tokens, is how many each query reads."""

    query: ArraySpec
    key: ArraySpec
    weights: ArraySpec
    ends: ArraySpec
    key_scale: ArraySpec | None = None
    k: int


class LightningIndexer(Operation):
    """The k tokens s before a query's end with the largest `I[t,s] = key_scale[s] sum_h weights[t,h] relu(query[t,h] . key[s])`.

    Products and sums are float32. Of equal scores the earlier token is chosen, 0 and -0 being equal; NaN counts as the lowest
    finite score, and so does -inf. There is no gradient. Source: DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1.
    """

    name = "lightning_indexer"
    Call = LightningIndexerCall
    Inputs = LightningIndexerInputs
    Outputs = LightningIndexerOutputs
    revisions = (1,)
    differentiable = ()
    shardable = ("b", "t")

    def canonicalise(
        self,
        query: Any,
        key: Any,
        weights: Any,
        kv_lens: Any = None,
        key_scale: Any = None,
        *,
        k: int,
        causal: bool = True,
    ) -> Bound:
        """Check, and say for each query where the tokens that it sees end.

        Args:
            query: `[B,T,H,D]`, floating, or float8_e4m3fn: what it was divided by belongs into weights.
            key: `[B,S,D]` in the query's dtype.
            weights: `[B,T,H]`, floating.
            kv_lens: integers `[B]`: how many of the S tokens exist; query t is token `kv_lens - T + t`. None: all, and query t is
                token t.
            key_scale: what each key was divided by, `[B,S]`, floating.
            k: tokens of each query, at most S.
            causal: only tokens up to the query's own number.
        """
        check_array("query", query, ndim=4)
        if query.dtype != FLOAT8:
            check_compute("query", query)
        check_array("key", key, ndim=3)
        check_compute("weights", weights, ndim=3)
        batch, length, heads, size = query.shape
        tokens = key.shape[1]
        if key.dtype != query.dtype:
            raise wrong_type("key", f"dtype {key.dtype}", f"the query's dtype {query.dtype}")
        if not size:
            raise invalid("query", f"shape {tuple(query.shape)}", "at least one channel")
        check_shape("key", key, (batch, tokens, size), "[B,S,D]")
        check_shape("weights", weights, (batch, length, heads), "[B,T,H]")
        if key_scale is not None:
            check_compute("key_scale", key_scale, ndim=2)
            check_shape("key_scale", key_scale, (batch, tokens), "[B,S]")
        count = integer("k", k, 0)
        if count > tokens:
            raise invalid("k", count, f"at most {tokens} = S, the tokens of key")
        if not isinstance(causal, bool):
            raise wrong_type("causal", repr(causal), "True or False")
        lengths = jnp.full(batch, tokens, jnp.int32)
        first = jnp.zeros(batch, jnp.int32)
        if kv_lens is not None:
            check_row_lengths(kv_lens, query, key, "key")
            lengths = jnp.clip(as_int32(kv_lens), 0, tokens)
            first = lengths - length
        ends = jnp.broadcast_to(lengths[:, None], (batch, length))
        if causal:
            ends = jnp.clip(first[:, None] + jnp.arange(1, length + 1, dtype=jnp.int32)[None], 0, ends)
        wide = statistics_dtype(str(query.dtype))
        query, key, weights, key_scale = jax.lax.stop_gradient((query, key, weights, key_scale))
        inputs = LightningIndexerInputs(
            query, key, weights.astype(wide), ends, None if key_scale is None else key_scale.astype(wide)
        )
        call = LightningIndexerCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            k=count,
        )
        return Bound(call, inputs, lambda outputs: outputs.tokens)

    def random_inputs(self, call: LightningIndexerCall, rng: np.random.Generator, **given: Any) -> LightningIndexerInputs:
        """The last of the tokens are those of the queries."""
        tokens, queries = call.key.shape[1], call.query.shape[1]
        ends = np.clip(positions(call.ends) + (tokens - queries + 1), 0, tokens)
        return super().random_inputs(call, rng, **{"ends": ends.astype(np.int32), **given})

    def dimensions(self, call: LightningIndexerCall) -> Mapping[str, str]:
        return {
            "query": "b t h d",
            "key": "b s d",
            "weights": "b t h",
            "ends": "b t",
            "key_scale": "b s",
            "tokens": "b t k",
        }

    def output_specs(self, call: LightningIndexerCall) -> LightningIndexerOutputs:
        return LightningIndexerOutputs(ArraySpec((*call.query.shape[:2], call.k), "int32"))

    def public(self, call: LightningIndexerCall) -> tuple[str, ...]:
        return ("tokens",)

    def cost(self, call: LightningIndexerCall, phase: Phase) -> Cost:
        """Of queries that see all tokens; how many they do see is known at run time."""
        if phase == "backward":
            return Cost(0, 0)
        given = [spec for spec in (call.query, call.key, call.weights, call.ends, call.key_scale) if spec is not None]
        moved = sum(spec.nbytes for spec in (*given, self.output_specs(call).tokens))
        return Cost(2 * call.query.size * call.key.shape[1], moved)


OPERATION = LightningIndexer()
