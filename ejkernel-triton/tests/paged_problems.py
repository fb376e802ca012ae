"""Helpers: problems of `paged_attention` whose unused slots hold NaN."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ejkernel.operations.paged_attention.cases import cache_of
from ejkernel.operations.paged_attention.interface import OPERATION

MIXED = ((1, 150), (3, 40), (0, 9), (1, 1), (5, 5), (1, 0))
ORDER = {"pthd": (0, 1, 2, 3), "phtd": (0, 2, 1, 3), "hptd": (2, 0, 1, 3)}


def problem(
    requests=MIXED,
    *,
    page_size=8,
    heads=2,
    key_heads=1,
    size=8,
    value_size=None,
    layout="pthd",
    dtype="float32",
    stored=None,
    spare_tokens=1,
    broken_page=False,
    seed=0,
    **options,
):
    """A canonical call and its arrays; slots that no request uses hold NaN."""
    rng = np.random.default_rng(seed)
    described, used = cache_of(rng, requests, page_size=page_size)
    if broken_page:
        described["block_tables"][0, 3] = len(used)
    tokens = int(described["query_start_loc"][-1]) + spare_tokens

    def pages(heads, size, order):
        array = rng.standard_normal((*used.shape, heads, size)).astype(np.float32) * (1 if stored is None else 40)
        if stored != "int8":
            array[~used] = np.nan
        return jnp.asarray(array.transpose(order), stored or dtype)

    if layout == "interleaved":
        cache = {"key_pages": pages(2 * key_heads, size, (0, 1, 2, 3))}
    else:
        cache = {
            "key_pages": pages(key_heads, size, ORDER[layout]),
            "value_pages": pages(key_heads, value_size or size, ORDER[layout]),
        }
    query = jnp.asarray(rng.standard_normal((tokens, heads, size)), dtype)
    bound = OPERATION.canonicalise(query, **cache, **described, layout=layout, return_lse=True, **options)
    return bound.call, bound.inputs


def draw(*shape, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PROBLEMS = {
    "plain": {},
    "window": {"sliding_window": 21},
    "window of one": {"sliding_window": 1},
    "window, not causal": {"sliding_window": 21, "causal": False},
    "not causal": {"causal": False},
    "soft cap": {"logits_soft_cap": 1.5, "softmax_scale": 2.0},
    "sinks": {"softmax_aux": draw(2)},
    "several sinks": {"softmax_aux": draw(2, 3), "sliding_window": 3},
    "alibi": {"alibi_slopes": np.array([0.1, 0.4], np.float32)},
    "tree": {"qq_bias": np.where(draw(6, 4, 4) > 0.7, -np.inf, draw(6, 4, 4)).astype(np.float32)},
    "one tree, window": {"qq_bias": np.triu(np.full((5, 5), -np.inf, np.float32), 1), "sliding_window": 4},
    "int8": {"stored": "int8", "k_scale": np.float32(0.01), "v_scale": np.array([0.03], np.float32)},
    "e4m3": {"stored": "float8_e4m3fn", "k_scale": np.float32(0.02), "v_scale": np.float32(0.02)},
    "e5m2": {"stored": "float8_e5m2", "k_scale": np.float32(0.02), "v_scale": np.float32(0.02)},
    "one-token pages": {"page_size": 1},
    "pages of a block": {"page_size": 16},
    "pages of blocks": {"page_size": 64},
    "pages of three": {"page_size": 3},
    "heads before tokens": {"layout": "phtd", "key_heads": 2, "heads": 4},
    "heads first": {"layout": "hptd", "key_heads": 2, "heads": 4},
    "interleaved": {"layout": "interleaved", "key_heads": 2, "heads": 4},
    "group of three": {"heads": 6, "key_heads": 2, "size": 5, "value_size": 19},
    "group of forty": {"requests": ((1, 40), (2, 2)), "heads": 40},
    "page outside": {"broken_page": True},
    "page of a whole block outside": {"requests": ((5, 150), (1, 100)), "page_size": 32, "broken_page": True},
    "pages of whole blocks outside": {"requests": ((5, 150), (1, 100)), "broken_page": True},
    "negative scale": {"requests": ((5, 150), (1, 100)), "softmax_scale": -0.7},
    "whole blocks, int8": {
        "requests": ((5, 150), (1, 100)),
        "page_size": 16,
        "stored": "int8",
        "k_scale": np.float32(0.01),
        "v_scale": np.float32(1),
    },
}
