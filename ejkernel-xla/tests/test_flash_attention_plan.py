"""The tiles that attention visits, against every entry of the score matrix."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations import get_operation
from ejkernel.plugin import Target
from ejkernel_xla.flash_attention.config import heuristic
from ejkernel_xla.flash_attention.masks import plan

QUERIES, KEYS = 9, 7
WINDOWS = [None, *itertools.product((None, 0, 1, 3, 5, 6, 7, 8), (None, 0, 2, 5, 6))]


def visible(causal: bool, window: tuple[int | None, int | None] | None, chunk: int | None) -> np.ndarray:
    query, key = np.arange(QUERIES)[:, None], np.arange(KEYS)[None]
    left, right = window or (None, None)
    seen = np.ones((QUERIES, KEYS), bool)
    for asked, rule in (
        (causal, key <= query),
        (left is not None, query <= key + (left or 0)),
        (right is not None, key <= query + (right or 0)),
        (chunk is not None, query // (chunk or 1) == key // (chunk or 1)),
    ):
        seen &= rule | (not asked)
    return seen


@pytest.mark.parametrize("chunk", [None, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [(9, 7), (3, 7), (4, 3), (2, 5), (1, 1)])
def test_every_visible_entry_is_in_one_tile_and_hidden_ones_are_known(blocks, causal, chunk):
    array = jnp.zeros((1, QUERIES, 1, 4))
    for window in WINDOWS:
        bound = get_operation("flash_attention").canonicalise(
            array, array[:, :KEYS], array[:, :KEYS], causal=causal, sliding_window=window, chunk_size=chunk
        )
        found = plan(bound.call, *blocks)
        seen = visible(causal, window, chunk)
        visits = np.zeros((QUERIES, KEYS), int)
        hides = False
        for query, key, first_query, first_key, _ in found.tiles:
            rows, columns = slice(first_query, query + found.block_q), slice(first_key, key + found.block_k)
            visits[rows, columns] += 1
            hides |= not seen[query : query + found.block_q, key : key + found.block_k].all()
        assert (visits[seen] == 1).all() and visits.max() <= 1, (window, found.tiles)
        assert found.structured >= hides, (window, "a visited tile hides entries and is said to be plain")


def chosen(queries: int, keys: int, heads: int, backend: str = "cpu", **options):
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32) for length in (queries, keys))
    call = get_operation("flash_attention").canonicalise(query, key, key, **options).call
    config = heuristic(call, Target(backend))
    return call, ((config.block_q, config.block_k), (config.block_q_backward, config.block_k_backward))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 200}], ids=["full", "narrow window"])
@pytest.mark.parametrize("heads", [1, 2, 8, 32])
def test_little_is_computed_twice_above_a_tile(heads, options):
    """Tiles of 512 would do 2.6 times the work that a length of 640 needs."""
    for queries, keys in [
        *((length, length) for length in range(513, 2300, 37)),
        (640, 1300),
        (1300, 640),
        (40, 640),
        (640, 40),
    ]:
        _, phases = chosen(queries, keys, heads, **options)
        for block_q, block_k in phases:
            for length, block in ((queries, block_q), (keys, block_k)):
                assert -(-length // block) * min(block, length) <= 1.13 * length, (queries, keys, block_q, block_k)
    call, phases = chosen(640, 640, heads)
    for blocks in phases:
        found = plan(call, *blocks)
        assert len(found.tiles) * found.block_q * found.block_k <= 1.25 * 640 * 640


@pytest.mark.parametrize("length", [1024, 2048, 4096])
@pytest.mark.parametrize(("heads", "block"), [(2, 512), (4, 512), (8, 256), (16, 256), (32, 128)])
def test_lengths_that_tiles_divide_keep_them(heads, block, length):
    assert chosen(length, length, heads)[1] == ((block, block),) * 2
    assert chosen(length, length, heads, "gpu")[1] == ((512, 512),) * 2
