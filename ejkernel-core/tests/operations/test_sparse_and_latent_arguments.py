"""What `block_sparse_attention` and `latent_paged_attention` refuse, and what their canonical calls keep."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel import MaskInfo
from ejkernel.operations import get_operation
from ejkernel.operations.block_sparse_attention import tiles
from ejkernel.operations.block_sparse_attention.interface import as_flash_attention


def rule(query, key):
    return key <= query


def block_sparse(**change):
    arrays = {name: np.zeros((2, 20, 2, 4), np.float32) for name in ("query", "key", "value")}
    return get_operation("block_sparse_attention").canonicalise(**{**arrays, **change})


LISTS = {"key_tiles": np.zeros((2, 3, 3), np.int32), "q_blocksize": 8, "kv_blocksize": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**LISTS, "key_tiles": np.zeros((2, 2, 3), np.int32)}, r"key_tiles: got shape \(2, 2, 3\), expected \[2 or 1, 3, m\]"),
        ({**LISTS, "key_tiles": np.zeros((2, 5, 3, 3), np.int32)}, r"key_tiles: got shape \(2, 5, 3, 3\).* heads, 3 blocks of"),
        ({**LISTS, "key_tiles": np.zeros((2, 3, 3), np.float32)}, "key_tiles: got dtype float32, expected an integer type"),
        ({**LISTS, "q_blocksize": 0}, "q_blocksize: got 0, expected a value >= 1"),
        ({**LISTS, "kv_blocksize": None}, "kv_blocksize: got None"),
        ({**LISTS, "full_tiles": np.zeros((1, 3, 3), bool)}, r"full_tiles: got shape \(1, 3, 3\)"),
        ({**LISTS, "full_tiles": np.zeros((2, 3, 3), np.int32)}, "full_tiles: got dtype int32, expected bool"),
        ({"q_blocksize": 8}, "q_blocksize: got 8, expected None without key_tiles"),
        ({"full_tiles": np.zeros((2, 3, 3), bool)}, "full_tiles: .*expected None without key_tiles"),
        ({"mask_builder": 3}, "mask_builder: got 3, expected a function"),
        ({"mask_builder": lambda query: query > 0}, "mask_builder: got a function that fails: .* takes 1 positional argument"),
        ({"mask_builder": lambda query, key: query - key}, "mask_builder: got a function that returns int32 of shape"),
        ({"mask_builder": lambda query, key: query > key and True}, "mask_builder: got a function that fails"),
        ({"mask_builder": lambda query, key: (query > key)[..., None, :]}, "mask_builder: got a function that returns bool of"),
        ({"query": np.zeros((1, 20, 2, 4), np.float32)}, "key: got batch size 2, expected the query's 1"),
    ],
)
def test_block_sparse_refuses(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        block_sparse(**change)


def test_a_predicate_gets_positions_that_nothing_else_needs():
    info = MaskInfo(query_positions=np.arange(20)[None] + 5, causal_offset=2)
    assert block_sparse(mask_info=info).inputs.query_positions is None
    bound = block_sparse(mask_info=info, mask_builder=rule)
    assert bound.inputs.query_positions[0, :2].tolist() == [7, 8]
    shifted = block_sparse(mask_info=MaskInfo(causal_offset=3), mask_builder=rule)
    assert shifted.inputs.query_positions[0, :2].tolist() == [3, 4]
    causal = block_sparse(mask_info=MaskInfo(causal_offset=3), mask_builder=rule, causal=True)
    assert causal.inputs.query_positions is None and causal.call.query_offset == 3


def test_the_dense_problem_keeps_everything_but_lists_and_predicate():
    bound = block_sparse(**LISTS, mask_builder=rule, causal=True, sliding_window=(3, None), logits_soft_cap=2.0)
    call, inputs = as_flash_attention(bound.call, bound.inputs)
    assert (call.causal, call.window, call.logits_soft_cap, call.softmax_scale) == (True, (3, None), 2.0, 0.5)
    assert inputs.query is bound.inputs.query and call.dropout_rate == 0.0


def test_lists_and_maps_are_inverse():
    some = np.random.default_rng(0).random((2, 4, 5)) < 0.5
    lists = tiles.listed(some, np.zeros_like(some))
    assert (np.asarray(lists.counts) == some.sum(-1)).all()
    assert (np.asarray(tiles.mapped(lists, 5)) == some).all()
    assert not np.asarray(lists.full_tiles).any()


def latent(**change):
    arrays = {
        "query_nope": np.zeros((3, 2, 6), np.float32),
        "query_pe": np.zeros((3, 2, 4), np.float32),
        "pages": np.zeros((5, 4, 10), np.float32),
        "query_start_loc": np.array([0, 1, 3], np.int32),
        "kv_lens": np.array([2, 3], np.int32),
        "block_tables": np.zeros((2, 2), np.int32),
    }
    return get_operation("latent_paged_attention").canonicalise(**{**arrays, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_pe": np.zeros((3, 1, 4), np.float32)}, r"query_pe: got shape \(3, 1, 4\)"),
        ({"query_pe": np.zeros((3, 2, 4), np.float16)}, "query_pe: got dtype float16, expected that of query_nope"),
        ({"pages": np.zeros((5, 4, 9), np.float32)}, "pages: got 9 channels for 2 heads, expected at least 10"),
        ({"pages": np.zeros((5, 4, 10), np.int32)}, "pages: got dtype int32"),
        ({"pages": np.zeros((5, 10), np.float32)}, "pages: got shape .* with 2 axes, expected 3 axes"),
        ({"pe_offset": 5}, "pe_offset: got 5, expected a value >= 6"),
        ({"pe_offset": 7}, "pages: got 10 channels for 2 heads, expected at least 11"),
        ({"kv_lens": np.zeros(3, np.int32)}, "query_start_loc: got shape"),
        ({"k_scale": np.zeros(2, np.float32)}, r"k_scale: got shape \(2,\)"),
        ({"sliding_window": 0}, "sliding_window: got 0"),
    ],
)
def test_latent_refuses(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        latent(**change)


def test_latent_defaults():
    call = latent(sliding_window=(3, 0)).call
    assert (call.pe_offset, call.softmax_scale, call.window) == (6, 10**-0.5, 4)
    assert latent(k_scale=0.5).inputs.key_scale.tolist() == [[0.5]]
