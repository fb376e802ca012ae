"""`paged_attention` on XLA, through the public functions: one program for every mix, no leaks, equality of all forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.operations.paged_attention.cases import cache_of
from ejkernel_xla.paged_attention.config import PagedAttentionConfig, heuristic

HEADS, KEY_HEADS, SIZE, PAGE = 4, 2, 8, 4


def problem(requests: Any, *, seed: int = 0, fill: float = 0.0, spare: int = 0) -> dict[str, Any]:
    """Queries, caches whose unused slots hold `fill`, and the description of the requests."""
    rng = np.random.default_rng(seed)
    described, used = cache_of(rng, requests, page_size=PAGE)
    tokens = int(described["query_start_loc"][-1]) + spare

    def cache() -> jax.Array:
        array = rng.standard_normal((*used.shape, KEY_HEADS, SIZE)).astype(np.float32)
        array[~used] = fill
        return jnp.asarray(array)

    return {
        "queries": jnp.asarray(rng.standard_normal((tokens, HEADS, SIZE)), jnp.float32),
        "key_cache": cache(),
        "value_cache": cache(),
        **{name: jnp.asarray(array) for name, array in described.items()},
    }


def dense(arrays: dict[str, Any], request: int) -> tuple[Any, Any, Any]:
    """One request's queries, keys and values `[1, T, H, D]`, without pages."""
    start, end = (int(x) for x in arrays["query_start_loc"][request : request + 2])
    length = int(arrays["kv_lens"][request])
    pages = arrays["block_tables"][request, : -(-length // PAGE)]
    key, value = (arrays[name][pages].reshape(1, -1, KEY_HEADS, SIZE)[:, :length] for name in ("key_cache", "value_cache"))
    return arrays["queries"][None, start:end], key, value


def by_flash_attention(arrays: dict[str, Any], **options: Any) -> np.ndarray:
    """The same by `flash_attention`, one request after the other; tokens of none are 0."""
    out = np.zeros(arrays["queries"].shape, np.float32)
    for request in range(len(arrays["kv_lens"])):
        query, key, value = dense(arrays, request)
        start = int(arrays["query_start_loc"][request])
        if query.shape[1] and key.shape[1]:
            found = ejkernel.flash_attention(query, key, value, causal=True, causal_alignment="bottom_right", **options)
            out[start : start + query.shape[1]] = found[0]
    return out


def test_equals_flash_attention_of_every_request():
    arrays = problem(((3, 3), (1, 7), (5, 13), (0, 4)), fill=np.nan, spare=2)
    np.testing.assert_allclose(ejkernel.unified_attention(**arrays), by_flash_attention(arrays), atol=2e-6)
    windowed = ejkernel.unified_attention(**arrays, sliding_window=3, logits_soft_cap=2.0)
    expected = by_flash_attention(arrays, sliding_window=(2, 0), logits_soft_cap=2.0)
    np.testing.assert_allclose(windowed, expected, atol=2e-6)


def test_one_compilation_serves_fifty_mixes():
    """Starts, lengths and tables are data: 50 mixes of prompts, chunks and single steps, one program, right numbers."""
    rng = np.random.default_rng(0)
    attend = jax.jit(lambda **arrays: ejkernel.unified_attention(**arrays))
    for mix in range(50):
        new = rng.multinomial(rng.integers(1, 13), [0.25] * 4)
        keys = new + rng.integers(0, 8, 4)
        arrays = problem(list(zip(new, keys, strict=True)), seed=mix)
        room = {"queries": 12, "key_cache": 26, "value_cache": 26}
        padded = {
            name: jnp.pad(array, [(0, room[name] - len(array)), (0, 0), (0, 0), (0, 0)][: array.ndim], constant_values=7.0)
            for name, array in arrays.items()
            if name in room
        }
        table = jnp.pad(arrays["block_tables"], ((0, 0), (0, 6 - arrays["block_tables"].shape[1])), constant_values=-1)
        out = attend(**{**arrays, **padded, "block_tables": table})
        expected = by_flash_attention(arrays) if mix % 10 == 0 else np.asarray(ejkernel_reference(arrays))
        np.testing.assert_allclose(out[: len(expected)], expected, atol=5e-6, err_msg=str(mix))
        np.testing.assert_array_equal(out[int(new.sum()) :], 0)
    assert attend._cache_size() == 1


def ejkernel_reference(arrays: dict[str, Any]) -> np.ndarray:
    """Softmax attention in NumPy, request by request."""
    host = {name: np.asarray(array, np.float64) if array.ndim > 2 else np.asarray(array) for name, array in arrays.items()}
    out = np.zeros(host["queries"].shape)
    for r, length in enumerate(host["kv_lens"]):
        start, end = host["query_start_loc"][r : r + 2]
        slots = np.arange(length)
        page = host["block_tables"][r, slots // PAGE]
        key, value = (host[name][page, slots % PAGE].repeat(2, axis=1) for name in ("key_cache", "value_cache"))
        logits = np.einsum("qhd,shd->hqs", host["queries"][start:end], key) / np.sqrt(SIZE)
        seen = slots <= (length - (end - start) + np.arange(end - start))[:, None]
        weights = np.exp(logits) * seen
        out[start:end] = np.einsum("hqs,shd->qhd", weights / weights.sum(-1, keepdims=True), value) if length else 0
    return out


def test_a_key_that_a_later_token_sees_does_not_leak_to_an_earlier_one():
    """Request 1's last new token stores NaN: its own output is NaN, and nobody else's, forward and gradients."""
    arrays = problem(((2, 5), (3, 6)))
    page, offset = arrays["block_tables"][1, 5 // PAGE], 5 % PAGE
    for name in ("key_cache", "value_cache"):
        poisoned = {**arrays, name: arrays[name].at[page, offset, 0, 3].set(jnp.nan)}
        out = np.asarray(ejkernel.unified_attention(**poisoned))
        assert np.isnan(out[4, :2]).all() and np.isfinite(out[4, 2:]).all()
        np.testing.assert_array_equal(out[:4], ejkernel.unified_attention(**arrays)[:4])

        def first(queries: Any, poisoned: Any = poisoned) -> Any:
            return jnp.sum(jnp.sin(ejkernel.unified_attention(**{**poisoned, "queries": queries})[:4]))

        gradient = np.asarray(jax.grad(first)(arrays["queries"]))
        assert np.isfinite(gradient[:4]).all() and np.abs(gradient[:4]).max() > 1e-3


def test_padding_tokens_may_hold_anything():
    arrays = problem(((3, 5), (1, 4)), spare=3)
    poisoned = {**arrays, "queries": arrays["queries"].at[4:].set(jnp.nan)}

    def loss(key_cache: Any, arrays: Any) -> Any:
        return jnp.sum(ejkernel.unified_attention(**{**arrays, "key_cache": key_cache}) ** 2)

    for got, expected in zip(
        jax.value_and_grad(loss)(arrays["key_cache"], poisoned),
        jax.value_and_grad(loss)(arrays["key_cache"], arrays),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


def test_pages_outside_of_the_cache_are_not_seen():
    """An entry that is needed and names no page hides its keys; it never reads another page in its place."""
    arrays = problem(((1, 7),), fill=np.nan)
    for entry in (-1, 10**9):
        broken = {**arrays, "block_tables": arrays["block_tables"].at[0, 0].set(entry)}
        query, key, value = dense(arrays, 0)
        rest = ejkernel.flash_attention(query, key[:, PAGE:], value[:, PAGE:])[0]
        np.testing.assert_allclose(ejkernel.unified_attention(**broken), rest, atol=2e-6)


@pytest.mark.parametrize("config", [(1, 1, 1), (1, 8, 3), (2, 3, 2), (4, 5, 1), (16, 64, 8)])
def test_every_config_gives_the_same(config: tuple[int, int, int]):
    arrays = problem(((3, 3), (1, 9), (5, 13)), fill=np.nan, spare=1)
    out = ejkernel.unified_attention(**arrays, cfg=PagedAttentionConfig(*config), sliding_window=5)
    np.testing.assert_allclose(out, ejkernel.unified_attention(**arrays, sliding_window=5), atol=2e-6)


def test_work_follows_the_lengths():
    """A program for tables of 4096 keys takes as many steps as the longest request asks for, not as the tables allow."""
    rng = np.random.default_rng(0)
    operation = get_operation("paged_attention")
    arrays = {
        "query": jnp.asarray(rng.standard_normal((2, HEADS, SIZE)), jnp.float32),
        "key_pages": jnp.ones((512, 16, KEY_HEADS, SIZE)),
        "value_pages": jnp.ones((512, 16, KEY_HEADS, SIZE)),
        "query_start_loc": jnp.arange(3, dtype=jnp.int32),
        "kv_lens": jnp.array([4, 8], jnp.int32),
        "block_tables": jnp.zeros((2, 256), jnp.int32),
    }
    call = operation.canonicalise(**arrays).call
    from ejkernel.targets import Target

    assert heuristic(call, Target("cpu")).block_q == 1
    compiled = jax.jit(lambda **arrays: operation.invoke(arrays, {})).lower(**arrays).compile()
    # 2 requests x 4096 keys x 2 heads x 8 channels x 4 bytes would be 1 MiB for keys alone
    assert compiled.memory_analysis().temp_size_in_bytes < 600_000


def test_lse_combines_parts_of_a_context():
    arrays = problem(((1, 12), (1, 9)))
    slots = (arrays["block_tables"][..., None] * PAGE + jnp.arange(PAGE)[None, None]).reshape(2, -1)
    keys, values = (arrays[name].reshape(-1, KEY_HEADS, SIZE) for name in ("key_cache", "value_cache"))
    whole, lse = ejkernel.decode_attention(arrays["queries"], keys, values, slots, arrays["kv_lens"])
    first = ejkernel.decode_attention(arrays["queries"], keys, values, slots, jnp.array([5, 5]))
    second = ejkernel.decode_attention(arrays["queries"], keys, values, slots[:, 5:], arrays["kv_lens"] - 5)
    np.testing.assert_allclose(jnp.logaddexp(first[1], second[1]), lse, atol=2e-6)
    combined = first[0] * jnp.exp(first[1] - lse)[..., None] + second[0] * jnp.exp(second[1] - lse)[..., None]
    np.testing.assert_allclose(combined, whole, atol=2e-6)


def test_tree_of_drafts_equals_each_branch_alone():
    """Two branches after one prefix, verified at once: each sees the prefix and its own ancestors only."""
    arrays = problem(((3, 8),))
    tree = jnp.where(jnp.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) == 1, 0, -jnp.inf)
    out = ejkernel.unified_attention(**arrays, qq_bias=tree)
    query, key, value = dense(arrays, 0)
    for node, ancestors in ((0, [5]), (1, [5, 6]), (2, [5, 7])):
        seen = jnp.array([0, 1, 2, 3, 4, *ancestors])
        alone = ejkernel.flash_attention(query[:, node : node + 1], key[:, seen], value[:, seen])[0, 0]
        np.testing.assert_allclose(out[node], alone, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("layout", ["pthd", "phtd", "hptd"])
def test_nothing_is_repeated_for_grouped_heads_or_copied_from_the_cache(layout: str, dtype: str):
    """Neither temporaries of the size of the cache, nor keys repeated over query heads, in any layout and dtype."""
    requests, shape = 4, {"p": 1024, "t": 16, "h": 2, "d": 64}
    spec = jax.ShapeDtypeStruct
    described = (spec((requests,), "int32"), spec((requests, 8), "int32"))
    cache = spec(tuple(shape[axis] for axis in layout), dtype)
    step = jax.jit(lambda *arrays: ejkernel.page_attention(*arrays, layout=layout))
    compiled = step.lower(spec((requests, 8, 64), "float32"), cache, cache, *described).compile()
    # 4 requests x 128 keys x 2 heads x 64 channels x 4 bytes = 256 KiB for keys, as much for values; a cache has 2 to 8 MiB
    assert compiled.memory_analysis().temp_size_in_bytes < 1_200_000


def test_specs_may_name_mesh_axes_of_one_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1, 1), ("dp", "fsdp", "ep", "tp", "sp"))
    rng = np.random.default_rng(0)
    query, cache = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 2, 4), (2, 5, 1, 4)))
    start, end = jnp.array([0, 1]), jnp.array([5, 3])
    rows, keys = PartitionSpec(("dp", "fsdp"), "tp", None), PartitionSpec(("dp", "fsdp"), "sp", "tp", None)
    lengths = PartitionSpec(("dp", "fsdp"))
    specs = {"mesh": mesh, "in_specs": (rows, keys, keys, lengths, lengths, None), "out_specs": rows}
    split = ejkernel.ragged_decode_attention(query, cache, cache, start, end, **specs)
    assert np.abs(split - ejkernel.ragged_decode_attention(query, cache, cache, start, end)).max() < 1e-6
    query = query[:, None]
    rows = PartitionSpec(("dp", "fsdp"), None, "tp", None)
    split = ejkernel.flash_attention(query, cache, cache, mesh=mesh, in_specs=(rows, keys, keys), out_specs=rows)
    assert np.abs(split - ejkernel.flash_attention(query, cache, cache)).max() < 1e-6
