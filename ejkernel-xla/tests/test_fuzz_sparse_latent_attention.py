"""Random search over `sparse_latent_attention`: shapes, lists of tokens, dtypes, configs and `vmap`."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import strategies as st

from ejkernel_xla.sparse_latent_attention.config import SparseLatentAttentionConfig


@st.composite
def calls(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(draw(seeds))
    batch, queries, heads = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 11))), draw(st.sampled_from((1, 3)))
    tokens, slots = draw(st.sampled_from((1, 13))), draw(st.sampled_from((1, 6)))
    arrays = {
        "query": rng.standard_normal((batch, queries, heads, 8)).astype(np.float32),
        "key_value": rng.standard_normal((batch, tokens, 8)).astype(np.float32),
        "token_indices": rng.integers(-2, tokens + 2, (batch, queries, slots)).astype(np.int32),
    }
    options = {"value_size": draw(st.sampled_from((None, 5))), "return_lse": draw(st.booleans())}
    return arrays, options


configs = maybe(st.builds(SparseLatentAttentionConfig, st.sampled_from((1, 4, 32))))


@FEW
@hypothesis.given(call=calls(), dtype=dtypes, config=configs)
def test_against_reference(call: Any, dtype: str, config: Any) -> None:
    check_problem("sparse_latent_attention", *call, dtype, config=config)


@pytest.mark.slow
@MANY
@hypothesis.given(call=calls(), dtype=dtypes, config=configs)
def test_against_reference_at_length(call: Any, dtype: str, config: Any) -> None:
    check_problem("sparse_latent_attention", *call, dtype, config=config)


@FEW
@hypothesis.given(data=st.data())
def test_vmap(data: Any) -> None:
    arrays, options = data.draw(calls())
    check_vmap("sparse_latent_attention", arrays, options, data.draw(mapped_axes(arrays)))
