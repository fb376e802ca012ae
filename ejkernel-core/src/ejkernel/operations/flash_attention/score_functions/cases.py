"""Named problems of attention with score functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle

_FAR = 12
"""Distances of the table of biases."""


def _by_table(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any) -> Any:
    return score + table[head, jnp.clip(jnp.abs(query - key), 0, _FAR - 1)].astype(score.dtype)


def _gated(score: Any, batch: Any, head: Any, query: Any, key: Any, gates: Any) -> Any:
    scale, shift = gates["scale"][batch, head, query], gates["shift"][batch, key]
    return score * (1 + 0.3 * scale.astype(score.dtype)) + shift.astype(score.dtype)


def _by_vectors(score: Any, batch: Any, head: Any, query: Any, key: Any, given: Any) -> Any:
    return score + jnp.sum(given["query"][query] * given["key"][head, key]).astype(score.dtype)


def _hiding(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return jnp.where((query + 2 * key + head) % 5 == 0, -jnp.inf, 2 * jnp.tanh(score / 2))


def _by_logarithm(score: Any, batch: Any, head: Any, query: Any, key: Any, rates: Any) -> Any:
    """NaN, value and derivative, for keys that come later."""
    return score - rates[head].astype(score.dtype) * jnp.log((query - key).astype(score.dtype) + 1)


def _place(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score + 0.3 * (query * key % 7).astype(score.dtype)


def _same_document(batch: Any, head: Any, query: Any, key: Any, documents: Any) -> Any:
    return documents[batch, query] == documents[batch, key]


def _neighbours(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A square of 5 by 5 around the query on a grid 6 wide; the second head sees 3 by 3."""
    reach = 2 - jnp.minimum(head, 1)
    return (jnp.abs(query // 6 - key // 6) <= reach) & (jnp.abs(query % 6 - key % 6) <= reach)


def score_cases(arrays: Callable[..., Any]) -> tuple[Case, ...]:
    """The cases; `arrays` makes query, key and value, and gets what else there is as `extra`."""

    def given(**shapes: Any) -> Callable[[np.random.Generator, dict[str, Any]], None]:
        def add(rng: np.random.Generator, made: dict[str, Any]) -> None:
            found = {name: shape(rng) if callable(shape) else _normal(rng, shape) for name, shape in shapes.items()}
            made.update(found)

        return add

    def inputs(**shapes: tuple[int, ...]) -> Any:
        return given(mod_inputs=lambda rng: {name: _normal(rng, shape) for name, shape in shapes.items()})

    def gate(*shape: int) -> Any:
        return given(forget_gate=lambda rng: -np.abs(_normal(rng, shape)))

    def poisoned(rng: np.random.Generator, made: dict[str, Any]) -> None:
        """NaN in the gates of what no query sees."""
        made["key_lengths"] = np.array([15, 8], np.int32)
        gates = {"scale": _normal(rng, (2, 2, 13)), "shift": _normal(rng, (2, 21))}
        gates["shift"][0, 15:], gates["shift"][1, 8:] = np.nan, np.inf
        made["mod_inputs"] = gates

    documents = np.repeat(np.arange(3), (9, 4, 8))[None].repeat(2, 0).astype(np.int32)
    documents[1, 5:] += 1
    everything = {"causal": True, "sliding_window": 9, "logits_soft_cap": 4.0, "return_lse": True, "mask_mod": _hidden_thirds}
    return (
        Case("alibi", arrays(19, 23, heads=4, key_heads=2, extra=given(alibi_slopes=(4,)))),
        Case("alibi-rows", arrays(21, extra=given(alibi_slopes=(2, 2))), {"causal": True}),
        Case(
            "alibi-last-queries",
            arrays(9, 23, extra=given(alibi_slopes=(2,))),
            {"causal": True, "causal_alignment": "bottom_right"},
        ),
        Case("forget-gate", arrays(33, heads=4, key_heads=2, extra=gate(2, 4, 33)), {"causal": True}),
        Case(
            "forget-gate-last-queries",
            arrays(7, 29, extra=gate(1, 2, 29)),
            {"causal": True, "causal_alignment": "bottom_right"},
        ),
        Case("score-table", arrays(13, 21, heads=4, key_heads=2, extra=given(mod_inputs=(4, _FAR))), {"score_mod": _by_table}),
        Case(
            "score-gates",
            arrays(13, 21, extra=inputs(scale=(2, 2, 13), shift=(2, 21))),
            {"score_mod": _gated},
            frozenset({"transforms"}),
        ),
        Case("score-gates-poisoned", arrays(13, 21, extra=poisoned), {"score_mod": _gated}),
        Case("score-vectors", arrays(13, 21, extra=inputs(query=(13, 3), key=(2, 21, 3))), {"score_mod": _by_vectors}),
        Case("score-hides", arrays(19, sinks=(2,)), {"score_mod": _hiding}),
        Case("score-nan-where-hidden", arrays(17, extra=given(mod_inputs=(2,))), {"score_mod": _by_logarithm, "causal": True}),
        Case(
            "score-index",
            arrays(9, 12, extra=lambda rng, made: made.update(
                query_index=np.arange(9, dtype=np.int32)[None] * 3, key_index=np.arange(12, dtype=np.int32)[None] + 5
            )),
            {"score_mod": _place},
        ),
        Case("mask-mod-documents", arrays(21, extra=given(mod_inputs=lambda rng: documents)), {"mask_mod": _same_document}),
        Case("mask-mod-neighbours", arrays(30), {"mask_mod": _neighbours}),
        Case(
            "score-everything",
            arrays(20, heads=4, key_heads=2, value_size=5, bias=(1, 4, 20, 20), sinks=(4, 2), extra=gate(2, 4, 20)),
            {**everything, "score_mod": _hiding},
        ),
    )  # fmt: skip


def _hidden_thirds(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query + key) % 3 != batch


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


SCORE_TOGGLES: Mapping[str, Toggle] = {
    "score_mod": Toggle("score-hides", {"score_mod": None}),
    "mask_mod": Toggle("mask-mod-neighbours", {"mask_mod": None}),
    "mod_values": Toggle("alibi", drop="alibi_slopes"),
    "mod_integers": Toggle("mask-mod-documents", {"mask_mod": None}, drop="mod_inputs"),
    "batch_index": Toggle("score-gates", {"score_mod": None}, drop="mod_inputs"),
    "head_index": Toggle("alibi", drop="alibi_slopes"),
    "query_index": Toggle("score-index", drop="query_index"),
    "key_index": Toggle("score-index", drop="key_index"),
}
