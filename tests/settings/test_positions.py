"""Calls as older versions wrote them: optional arrays of attention functions by position."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np
import pytest
from public_calls import CALLS

import ejkernel

FORMER = {
    "apply_native_sparse_attention": "query key value block_indices block_counts block_size softmax_scale cu_seqlens",
    "attention": "query key value bias dropout_rng softmax_aux",
    "blocksparse_attention": "query key value softmax_aux bias",
    "chunked_prefill_paged_decode": "queries keys values key_cache value_cache kv_lens block_tables query_start_loc "
    "alibi_slopes softmax_aux",
    "deepseek_attn": "query key_value w_kc w_vc query_index key_index index_weights b_q b_k",
    "flash_attention": "query key value bias cum_seqlens_q cum_seqlens_k softmax_aux block_tables",
    "flash_attn_varlen": "q k v cu_seqlens_q cu_seqlens_k max_seqlens_q max_seqlens_k causal sm_scale layout",
    "flash_mla": "query key_value w_kc w_vc b_q b_k cu_seqlens",
    "gated_delta_product": "query key value beta decay initial_state",
    "gated_delta_rule": "query key value beta decay initial_state",
    "gla": "query key value g g_gamma softmax_scale initial_state reverse cu_seqlens",
    "gla_attention": "query key value g g_gamma initial_state cu_seqlens",
    "kernel_delta_attention": "query key value beta decay initial_state",
    "lightning_attention": "query key value initial_state cu_seqlens",
    "lightning_attn": "query key value layer_idx num_layers softmax_scale initial_state reverse cu_seqlens",
    "mlstm": "query key value input_gate forget_gate initial_state cu_seqlens",
    "multi_head_latent_attention": "query key_value w_kc w_vc b_q b_k cu_seqlens",
    "native_spare_attention": "q k v g_cmp g_slc block_indices block_counts block_size scale cu_seqlens",
    "native_sparse_attention": "query key value g_cmp g_slc block_indices block_counts cu_seqlens",
    "ragged_decode_attention": "query key value sequence_start sequence_end softmax_aux",
    "ragged_page_attention_v2": "queries kv_pages context_lens block_tables query_start_loc num_seqs softmax_aux",
    "ragged_page_attention_v3": "queries keys values kv_cache kv_lens block_tables query_start_loc distribution softmax_aux",
    "recurrent": "query key value g gk gv initial_state",
    "recurrent_attention": "query key value g g_gamma gk gv initial_state cu_seqlens",
    "retention": "query key value initial_state cu_seqlens",
    "ring_attention": "query key value softmax_aux bias",
    "rwkv4": "w u k v state",
    "rwkv6": "r k v w u initial_state cu_seqlens",
    "scaled_dot_product_attention": "query key value bias cum_seqlens_q cum_seqlens_k",
    "unified_attention": "queries key_cache value_cache kv_lens block_tables query_start_loc alibi_slopes qq_bias softmax_aux",
}
"""Positions by name, those of clients among them. `in_specs` keep these orders."""

MORE: dict[str, dict[str, Any]] = {
    "attention": {"softmax_aux": np.ones(4, np.float32)},
    "blocksparse_attention": {"softmax_aux": np.ones(4, np.float32)},
    "chunked_prefill_paged_decode": {"softmax_aux": np.ones(4, np.float32)},
    "deepseek_attn": {"b_k": np.ones((4, 8, 4), np.float32), "b_q": np.ones((4, 8, 4), np.float32)},
    "flash_attention": {"bias": np.ones((8, 8), np.float32), "softmax_aux": np.ones(4, np.float32)},
    "flash_attn_varlen": {"max_seqlens_q": 5, "causal": True, "sm_scale": 0.5},
    "lightning_attention": {"initial_state": np.ones((4, 4, 16, 16), np.float32)},
    "lightning_attn": {"softmax_scale": 0.5},
    "mlstm": {"cu_seqlens": np.array([0, 8], np.int32)},
    "ragged_decode_attention": {"softmax_aux": np.ones(4, np.float32)},
    "ragged_page_attention_v2": {"softmax_aux": np.ones(4, np.float32)},
    "ragged_page_attention_v3": {"softmax_aux": np.ones(4, np.float32)},
    "retention": {"initial_state": np.ones((4, 4, 16, 16), np.float32)},
    "ring_attention": {"softmax_aux": np.ones(4, np.float32), "bias": np.ones((8, 8), np.float32)},
    "rwkv6": {"initial_state": np.ones((4, 4, 16, 16), np.float32)},
    "scaled_dot_product_attention": {"bias": np.ones((8, 8), np.float32)},
    "unified_attention": {"softmax_aux": np.ones(4, np.float32)},
}
"""Optional arguments that the calls of `public_calls` do not give."""


def by_name(name: str) -> dict[str, Any]:
    call = CALLS[name]
    given = {**call.arrays, **call.options, **MORE.get(name, {})}
    if name == "mlstm":
        given = {key: value[:1] if value.ndim > 1 else value for key, value in given.items()}
    return given


@pytest.mark.unsampled
@pytest.mark.parametrize("name", FORMER)
def test_former_positions_mean_what_they_meant(name):
    given, order = by_name(name), FORMER[name].split()
    last = max(place for place, one in enumerate(order) if one in given)
    function = getattr(ejkernel, name)
    parameters = inspect.signature(function).parameters
    positional = [given.get(one, parameters[one].default) for one in order[: last + 1]]
    options = {one: value for one, value in given.items() if one not in order}
    required = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values())
    wanted = ejkernel.explain(name, **given).forward
    if last < required:  # nothing else is given
        assert ejkernel.explain(name, *positional, **options).forward.call == wanted.call
        return
    pairs = zip(order[required:], positional[required:], strict=False)
    named = [f"{one}=" for one, value in pairs if value is not None]
    with pytest.warns(DeprecationWarning, match=f"^{function.__name__}: pass {', '.join(named)} by name") as warned:
        found = ejkernel.explain(name, *positional, **options).forward
    assert found.call == wanted.call
    assert [one.filename for one in warned] == [__file__]


def test_results_are_the_same():
    given = {name: jax.numpy.asarray(array) for name, array in by_name("flash_attention").items() if name != "causal"}
    with pytest.warns(DeprecationWarning, match="pass bias=, softmax_aux= by name"):
        found = ejkernel.flash_attention(*(given.get(name) for name in FORMER["flash_attention"].split()[:7]))
    np.testing.assert_array_equal(found, ejkernel.flash_attention(**given))
