"""Attention of queries, keys and values of different dtypes: computed in the widest one, returned in the query's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

RNG = np.random.default_rng(0)
Q, K, V = (jnp.asarray(RNG.standard_normal((1, 6, 2, 8)), jnp.float32) for _ in range(3))
BOUNDS = jnp.array([0, 2, 6])


def heads_first(query: Any, key: Any, value: Any) -> Any:
    arrays = (jnp.swapaxes(array, 1, 2) for array in (query, key, value))
    return jnp.swapaxes(ejkernel.blocksparse_attention(*arrays), 1, 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "flash_attention": lambda *x: ejkernel.flash_attention(*x, causal=True),
    "scaled_dot_product_attention": ejkernel.scaled_dot_product_attention,
    "attention": lambda *x: ejkernel.attention(*x)[0],
    "weights": lambda *x: ejkernel.attention(*x)[1],
    "flash_attn_varlen": lambda *x: ejkernel.flash_attn_varlen(*(array[0] for array in x), BOUNDS)[None],
    "ring_attention": ejkernel.ring_attention,
    "blocksparse_attention": heads_first,
    "native_sparse_attention": lambda *x: ejkernel.native_sparse_attention(*x, block_size=2, block_counts=2, window_size=3),
    "apply_native_sparse_attention": lambda *x: ejkernel.apply_native_sparse_attention(
        *x, jnp.zeros((1, 6, 2, 1), jnp.int32), block_size=2
    ),
}
MIXES = (
    ("float32", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "float16", "float32"),
    ("float16", "float32", "bfloat16"),
)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_widest_dtype_inside_and_the_querys_outside(name: str, mix: tuple[str, str, str]) -> None:
    """The same bits as of a call in float32, rounded to the query's dtype; gradients in each array's own dtype."""
    narrow = tuple(array.astype(dtype) for array, dtype in zip((Q, K, V), mix, strict=True))
    wide = tuple(array.astype(jnp.float32) for array in narrow)
    got, wanted = FUNCTIONS[name](*narrow), FUNCTIONS[name](*wide)
    assert got.dtype == mix[0]
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted.astype(mix[0])))
    gradients = jax.grad(lambda *x: FUNCTIONS[name](*x).astype(jnp.float32).sum(), (0, 1, 2))(*narrow)
    assert tuple(str(gradient.dtype) for gradient in gradients) == mix
    assert all(np.all(np.isfinite(np.asarray(gradient, np.float32))) for gradient in gradients)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_dtype_that_holds_the_others(name: str) -> None:
    """Neither bfloat16 nor float16 holds the other's numbers: nobody said which should give way."""
    with pytest.raises(TypeError, match=r"got dtype b?float16, expected the (query|key)'s dtype b?float16, or float32"):
        FUNCTIONS[name](Q.astype(jnp.bfloat16), K.astype(jnp.float16), V.astype(jnp.float16))
    with pytest.raises(TypeError, match="value: got dtype float8_e4m3fn, expected the query's dtype bfloat16"):
        FUNCTIONS[name](Q.astype(jnp.bfloat16), K.astype(jnp.bfloat16), V.astype(jnp.float8_e4m3fn))
