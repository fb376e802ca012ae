"""Random search over `native_sparse_attention`: shapes, lists of blocks, packed sequences, dtypes, configs and `vmap`."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from fuzzing import FEW, MANY, check_problem, check_vmap, dtypes, mapped_axes, maybe, seeds
from hypothesis import strategies as st

from ejkernel_xla.native_sparse_attention.config import NativeSparseAttentionConfig


@st.composite
def calls(draw: Any, vmap: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(draw(seeds))
    packed = draw(st.booleans()) and not vmap
    batch, length = 1 if packed else draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 14, 19)))
    key_heads = draw(st.sampled_from((1, 2)))
    heads, slots, block_size = (
        key_heads * draw(st.sampled_from((1, 3))),
        draw(st.sampled_from((1, 4))),
        draw(st.sampled_from((1, 4, 8))),
    )

    def normal(heads: int, size: int) -> Any:
        return rng.standard_normal((batch, length, heads, size)).astype(np.float32)

    value_size = draw(st.sampled_from((8, 5)))
    arrays = {"query": normal(heads, 8), "key": normal(key_heads, 8), "value": normal(key_heads, value_size)}
    arrays["block_indices"] = rng.integers(-1, length // block_size + 2, (batch, length, key_heads, slots)).astype(np.int32)
    options: dict[str, Any] = {"block_size": block_size, "return_lse": draw(st.booleans())}
    counts = draw(st.sampled_from(("none", "int", "array")))
    if counts == "int":
        options["block_counts"] = draw(st.integers(0, slots + 1))
    elif counts == "array":
        arrays["block_counts"] = rng.integers(0, slots + 2, (batch, length, key_heads)).astype(np.int32)
    if packed:
        bounds = np.sort(rng.integers(0, length + 1, 3))
        arrays["cu_seqlens"] = np.array([0, *bounds], np.int32)
        for name in ("query", "key", "value"):
            arrays[name][:, bounds[-1] :] = np.nan
    return arrays, options


configs = maybe(st.builds(NativeSparseAttentionConfig, st.sampled_from((1, 4, 32))))


@FEW
@hypothesis.given(call=calls(), dtype=dtypes, config=configs)
def test_against_reference(call: Any, dtype: str, config: Any) -> None:
    check_problem("native_sparse_attention", *call, dtype, config=config)


@pytest.mark.slow
@MANY
@hypothesis.given(call=calls(), dtype=dtypes, config=configs)
def test_against_reference_at_length(call: Any, dtype: str, config: Any) -> None:
    check_problem("native_sparse_attention", *call, dtype, config=config)


@FEW
@hypothesis.given(data=st.data())
def test_vmap(data: Any) -> None:
    arrays, options = data.draw(calls(vmap=True))
    check_vmap("native_sparse_attention", arrays, options, data.draw(mapped_axes(arrays)))
