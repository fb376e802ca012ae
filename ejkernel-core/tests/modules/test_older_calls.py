"""Calls as users of the older packages write them, against dense formulas in NumPy float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel


def _decoded(query: Any, keys: Any, values: Any, lengths: Any, scale: float) -> np.ndarray:
    """One token per request over dense `[R, S, K, D]`."""
    query, keys, values = (np.asarray(array, np.float64) for array in (query, keys, values))
    group = query.shape[1] // keys.shape[2]
    out = np.zeros(query.shape)
    for request, length in enumerate(np.asarray(lengths)):
        for head in range(query.shape[1]):
            key, value = keys[request, :length, head // group], values[request, :length, head // group]
            logits = key @ query[request, head] * scale
            weights = np.exp(logits - logits.max())
            out[request, head] = weights / weights.sum() @ value
    return out


@pytest.mark.parametrize(("heads", "key_heads", "block_size"), [(16, 16, 16), (8, 4, 8), (4, 2, 4), (8, 2, 16)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_page_attention_reads_heads_before_tokens(heads: int, key_heads: int, block_size: int, scale: float | None):
    """Also where as many heads as tokens of a page leave both readings of the cache possible."""
    rng = np.random.default_rng(heads)
    caches = [jnp.asarray(rng.standard_normal((8, key_heads, block_size, 16)), jnp.float32) for _ in range(2)]
    query = jnp.asarray(rng.standard_normal((2, heads, 16)), jnp.float32)
    lengths, tables = jnp.array([block_size + 3, 2 * block_size]), jnp.array([[5, 0], [3, 7]])
    options = {} if scale is None else {"scale": scale}
    out = ejkernel.page_attention(query, *caches, lengths, tables, block_size=block_size, num_splits=0, **options)
    # [R, W, K, page_size, D] to [R, W * page_size, K, D]
    dense = [np.asarray(cache)[tables].swapaxes(2, 3).reshape(2, 2 * block_size, key_heads, 16) for cache in caches]
    wanted = _decoded(query, *dense, lengths, 0.25 if scale is None else scale)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    last = [jnp.asarray(np.asarray(cache).swapaxes(0, 1)) for cache in caches]  # [K, pages, page_size, D]
    chunk = ejkernel.prefill_page_attention(query[:1], *last, lengths[:1], tables[0], softmax_scale=scale)
    np.testing.assert_allclose(chunk, wanted[:1], atol=2e-6)


def test_page_attention_layout_is_kept_in_transforms():
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.standard_normal((4, 4, 4, 8)), jnp.float32)
    query, tables = jnp.asarray(rng.standard_normal((2, 4, 8)), jnp.float32), jnp.array([[1, 2], [3, 0]])
    lengths = jnp.array([5, 8])
    swapped = cache.swapaxes(1, 2)
    first = jax.jit(ejkernel.page_attention)(query, cache, cache, lengths, tables)
    second = ejkernel.page_attention(query, swapped, swapped, lengths, tables, layout="pthd")
    np.testing.assert_allclose(first, second, atol=1e-6)
    assert float(abs(first - ejkernel.page_attention(query, cache, cache, lengths, tables, layout="pthd")).max()) > 0.1


@pytest.mark.parametrize("shape", [(7, 5), (7, 3, 5)])
def test_mean_pooling_of_packed_rows(shape: tuple[int, ...]):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    bounds = jnp.array([0, 3, 3, 6])
    wanted = np.stack([np.asarray(x[:3]).mean(0), np.zeros(shape[1:]), np.asarray(x[3:6]).mean(0)])
    pooled = lambda x, bounds: ejkernel.mean_pooling(x, bounds, chunk_size=32)
    for run in (pooled, jax.jit(pooled)):
        np.testing.assert_allclose(run(x, bounds), wanted, atol=1e-6)
    slope = jax.grad(lambda x: pooled(x, bounds)[0].sum())(x)
    np.testing.assert_allclose(slope[:, ..., 0].reshape(7, -1)[:, 0], [1 / 3] * 3 + [0] * 4, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(pooled, (0, None))(x[None], bounds)[0], wanted, atol=1e-6)
    with pytest.raises(ValueError, match=r"cu_seqlens: got .* from 0 to at most 7 = length of x"):
        ejkernel.mean_pooling(x, jnp.array([0, 8]))
    with pytest.raises(ValueError, match="chunk_size: got 0, expected a value >= 1"):
        ejkernel.mean_pooling(x, bounds, chunk_size=0)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, bounds)]
    assert ejkernel.explain("mean_pooling", *shapes).forward.chosen is not None


def test_tiles_of_tokens_are_hints():
    """As in `mean_pooling`: upstream's chunk sizes change no result, and what is none is refused."""
    logits, labels = jnp.asarray(np.random.default_rng(0).standard_normal((4, 9)), jnp.float32), jnp.array([0, 3, 8, 2])
    same = ejkernel.fused_cross_entropy(logits, labels)
    np.testing.assert_array_equal(ejkernel.fused_cross_entropy(logits, labels, chunk_size=2).loss, same.loss)
    with pytest.raises(ValueError, match="chunk_size: got -1, expected a value >= 0"):
        ejkernel.fused_cross_entropy(logits, labels, chunk_size=-1)


def test_a_path_that_names_a_platform_runs_on_it():
    x = jnp.arange(12, dtype=jnp.float32).reshape(1, 4, 3)
    with pytest.warns(DeprecationWarning, match="is now ejkernel.mean_pooling"):
        from ejkernel.kernels._xla.mean_pooling import mean_pooling
    np.testing.assert_allclose(mean_pooling(x), [[4.5, 5.5, 6.5]])
    with pytest.warns(DeprecationWarning, match="is now ejkernel.rms_norm"):
        from ejkernel.kernels._triton.rms_norm import rms_norm
    with pytest.raises(ejkernel.NoKernelError, match="triton"):
        rms_norm(x, x[0, 0])
    np.testing.assert_allclose(rms_norm(x, x[0, 0], platform="xla"), ejkernel.rms_norm(x, x[0, 0]))
