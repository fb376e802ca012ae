"""Block-sparse attention on random problems: shapes, masks, predicates, lists of tiles, dtypes and block sizes, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import strategies as st

from ejkernel_xla.block_sparse_attention.config import BlockSparseAttentionConfig

pytestmark = pytest.mark.filterwarnings("ignore:causal. with causal=True the one query")


def near_or_first(query: Any, key: Any) -> Any:
    return (abs(query - key) < 4) | (key < 2)


def odd_together(query: Any, key: Any) -> Any:
    return (query + key) % 2 == 0


lengths = st.sampled_from((0, 1, 9, 24))
sides = st.sampled_from((None, 0, 3))


@dataclasses.dataclass(frozen=True)
class Drawn:
    arrays: dict[str, Any]
    options: dict[str, Any]
    dtype: str
    config: BlockSparseAttentionConfig


def _lists(draw: Any, rng: np.random.Generator, batch: int, queries: int, keys: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Random tiles, none twice in a list."""
    blocks = {"q_blocksize": draw(st.sampled_from((4, 7))), "kv_blocksize": draw(st.sampled_from((5, 8)))}
    rows, columns = -(-queries // blocks["q_blocksize"]), -(-keys // blocks["kv_blocksize"])
    tiles = np.argsort(rng.random((draw(st.sampled_from((1, batch))), rows, columns)), axis=-1)
    return {"key_tiles": np.where(rng.random(tiles.shape) < 0.7, tiles, -1).astype(np.int32)}, blocks


@st.composite
def problems(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(seeds))
    batch, queries, keys = draw(st.sampled_from((1, 2))), draw(lengths), draw(lengths)
    key_heads, group, value_size = draw(st.sampled_from(((1, 2, 4), (2, 1, 3))))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {
        "query": normal(batch, queries, key_heads * group, 4),
        "key": normal(batch, keys, key_heads, 4),
        "value": normal(batch, keys, key_heads, value_size),
    }
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "sliding_window": draw(maybe(st.tuples(sides, sides))),
        "chunk_size": draw(st.sampled_from((None, None, 6))),
        "logits_soft_cap": draw(st.sampled_from((None, 2.0))),
        "mask_builder": draw(st.sampled_from((None, near_or_first, odd_together))),
    }
    if draw(st.booleans()):
        arrays["bias"] = normal(draw(st.sampled_from((1, batch))), 1, queries, keys)
        arrays["softmax_aux"] = normal(key_heads * group)
    match draw(st.sampled_from(("none", "segments", "mask", "lists"))):
        case "segments":
            for name, count in (("query_segments", queries), ("key_segments", keys)):
                arrays[name] = np.sort(rng.integers(-1, 3, (draw(st.sampled_from((1, batch))), count)), axis=1).astype(np.int32)
        case "mask":
            arrays["mask"] = rng.random((draw(st.sampled_from((1, batch))), 1, queries, keys)) < 0.3
        case "lists":
            lists, blocks = _lists(draw, rng, batch, queries, keys)
            arrays, options = {**arrays, **lists}, {**options, **blocks}
    blocks = draw(st.sampled_from(((4, 4), (7, 5), (64, 64))))
    return Drawn(arrays, options, draw(dtypes), BlockSparseAttentionConfig(*blocks))


def check(drawn: Drawn) -> None:
    check_problem("block_sparse_attention", drawn.arrays, drawn.options, drawn.dtype, config=drawn.config)


@FEW
@hypothesis.given(problems())
def test_random_problems(drawn):
    check(drawn)


@pytest.mark.slow
@MANY
@hypothesis.given(problems())
def test_many_random_problems(drawn):
    check(drawn)


@FEW
@hypothesis.given(problems(), st.data())
def test_vmap(drawn, data):
    check_vmap("block_sparse_attention", drawn.arrays, drawn.options, data.draw(mapped_axes(drawn.arrays)))


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=60)
@hypothesis.given(problems(), st.data())
def test_many_vmap(drawn, data):
    check_vmap("block_sparse_attention", drawn.arrays, drawn.options, data.draw(mapped_axes(drawn.arrays)))
