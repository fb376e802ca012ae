"""Random search over paged caches: requests, layouts, options, dtypes and configs of both operations, against the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import given, strategies as st

from ejkernel.operations.common.pages import INTERLEAVED
from ejkernel.operations.paged_attention import cases as attention_cases
from ejkernel.operations.paged_cache_update import cases as update_cases
from ejkernel_xla.paged_attention.config import PagedAttentionConfig

Drawn = tuple[dict[str, Any], dict[str, Any]]
LAYOUTS = ("pthd", "phtd", "hptd", INTERLEAVED)


@st.composite
def requests(draw: Any) -> list[tuple[int, int]]:
    """Three requests `(new tokens, keys)` with 6 new tokens and at most 12 keys each, so that programs repeat."""
    new = draw(st.sampled_from([(2, 2, 2), (6, 0, 0), (1, 4, 1), (0, 1, 5), (3, 0, 3)]))
    return [(count, draw(st.integers(max(count, 0), 12))) for count in new]


def _fixed_room(arrays: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """Tables of 4 entries and caches of 12 pages, whatever the requests need."""
    axis = 1 if layout == "hptd" else 0
    found = dict(arrays)
    tables = found["block_tables"]
    found["block_tables"] = np.pad(tables, ((0, 0), (0, max(4 - tables.shape[1], 0))), constant_values=-1)
    for name in ("key_pages", "value_pages"):
        if name in found:
            more = 12 - found[name].shape[axis]
            found[name] = np.pad(found[name], [(0, max(more, 0)) if i == axis else (0, 0) for i in range(found[name].ndim)])
    return found


@st.composite
def attention(draw: Any) -> Drawn:
    layout = draw(st.sampled_from(LAYOUTS))
    stored = draw(st.sampled_from((None, None, None, "int8", "float8_e4m3fn")))
    scales = draw(st.sampled_from(((), (2,)) if stored == "int8" else (None, (), (2,))))
    make = attention_cases._arrays(
        draw(requests()),
        page_size=draw(st.sampled_from((1, 4))) if layout == "pthd" else 4,
        layout=layout,
        stored=stored,
        k_scale=scales,
        v_scale=scales,
        sinks=draw(st.sampled_from((None, (4,), (1, 2)))),
        alibi=draw(st.booleans()),
        tree=draw(st.sampled_from((0, 0, 3, 6))),
        trees=draw(st.booleans()),
        garbage=draw(st.sampled_from((-1, 99))),
    )
    options = {
        "layout": layout,
        "causal": draw(st.sampled_from((True, True, False))),
        "sliding_window": draw(maybe(st.sampled_from((1, 3, 100)))),
        "logits_soft_cap": draw(maybe(st.just(2.0))),
        "return_lse": draw(st.booleans()),
    }
    return _fixed_room(make(np.random.default_rng(draw(seeds))), layout), options


@st.composite
def update(draw: Any) -> Drawn:
    layout = draw(st.sampled_from(LAYOUTS))
    make = update_cases._arrays(
        draw(requests()),
        layout=layout,
        stored=draw(st.sampled_from((None, None, "int8", "float8_e4m3fn", "float8_e5m2"))),
        scales=draw(st.sampled_from((None, (), (2,)))),
        padded_heads=draw(st.integers(0, 1)) if layout == INTERLEAVED else 0,
        broken=draw(st.booleans()),
    )
    return _fixed_room(make(np.random.default_rng(draw(seeds))), layout), {"layout": layout}


configs = st.sampled_from((None, PagedAttentionConfig(1, 5, 2), PagedAttentionConfig(4, 3, 3), PagedAttentionConfig(8, 64, 1)))


@FEW
@given(attention(), dtypes, configs)
def test_attention(drawn: Drawn, dtype: str, config: Any):
    check_problem("paged_attention", *drawn, dtype, config=config)


@FEW
@given(update(), dtypes)
def test_update(drawn: Drawn, dtype: str):
    check_problem("paged_cache_update", *drawn, dtype)


@pytest.mark.slow
@MANY
@given(attention(), dtypes, configs)
def test_many_attention(drawn: Drawn, dtype: str, config: Any):
    check_problem("paged_attention", *drawn, dtype, config=config)


@pytest.mark.slow
@MANY
@given(update(), dtypes)
def test_many_update(drawn: Drawn, dtype: str):
    check_problem("paged_cache_update", *drawn, dtype)


@pytest.mark.slow
@MANY
@given(st.data())
def test_attention_vmap(data: Any):
    arrays, options = data.draw(attention())
    check_vmap("paged_attention", arrays, options, data.draw(mapped_axes(arrays)), size=2)


@pytest.mark.slow
@MANY
@given(st.data())
def test_update_vmap(data: Any):
    arrays, options = data.draw(update())
    check_vmap("paged_cache_update", arrays, options, data.draw(mapped_axes(arrays)), size=2)
