"""Native sparse attention on XLA: the three branches against dense formulas, the choice of blocks, memory, compilation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.operations.native_sparse_attention.forms import block_means, blocks_of
from ejkernel.operations.native_sparse_selection.interface import OPERATION as SELECTION
from ejkernel.utils import generate_block_indices
from ejkernel_xla.native_sparse_attention.config import NativeSparseAttentionConfig
from ejkernel_xla.native_sparse_attention.kernel import backward, forward

B, T, H, K, D, SIZE, COUNT, WINDOW = 2, 23, 4, 2, 8, 3, 4, 5
OPTIONS: dict[str, Any] = {"block_counts": COUNT, "block_size": SIZE, "window_size": WINDOW}


@pytest.fixture(scope="module")
def arrays() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 6)
    named = zip(("query", "key", "value"), keys[:3], strict=True)
    made = {name: jax.random.normal(key, (B, T, H if name == "query" else K, D)) for name, key in named}
    gates = zip(("g_cmp", "g_slc", "g_swa"), keys[3:], strict=True)
    return {**made, **{name: jax.nn.sigmoid(jax.random.normal(key, (B, T, H))) for name, key in gates}}


def run(arrays: dict[str, Any], **options: Any) -> jax.Array:
    arrays = dict(arrays)
    positional = [arrays.pop(name) for name in ("query", "key", "value")]
    return ejkernel.native_sparse_attention(*positional, **arrays, **{**OPTIONS, **options})


def chosen(query: Any, key: Any, count: Any = COUNT) -> np.ndarray:
    """The documented choice, one query at a time in float64: `[B,T,K,count]`, ascending, then -1 where there are fewer."""
    query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
    batch, length, key_heads = key.shape[:3]
    groups = query.shape[2] // key_heads
    counts = np.broadcast_to(count, key.shape[:3])
    found = np.full((batch, length, key_heads, counts.max()), -1)
    for row, token, head in np.ndindex(batch, length, key_heads):
        own, complete = token // SIZE, (token + 1) // SIZE
        means = key[row, : complete * SIZE, head].reshape(complete, SIZE, query.shape[3]).mean(1)
        logits = query[row, token, head * groups : (head + 1) * groups] @ means.T / np.sqrt(query.shape[3])
        weights = np.exp(logits - logits.max(initial=0))
        scores = (weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)).sum(0)
        first = list(dict.fromkeys(block for block in (own, own - 1, 0) if block >= 0))
        rest = [block for block in np.argsort(-scores, kind="stable") if block not in first]
        row_of = sorted((first + rest)[: counts[row, token, head]])
        found[row, token, head, : len(row_of)] = row_of
    return found


def selection(query: Any, means: Any, lse: Any, blocks: Any, count: int) -> Any:
    arrays = {"query": query, "means": means, "lse": lse, "own_blocks": blocks.token_numbers[None]}
    return SELECTION.invoke(arrays, {"count": count}, platform="xla")


def dense(arrays: dict[str, Any], indices: np.ndarray) -> jax.Array:
    """The gated sum from full score matrices, in plain JAX."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    batch, length, heads, size = query.shape
    groups, blocks = heads // key.shape[2], length // SIZE
    position = np.arange(length)
    named = (np.arange(length) // SIZE == indices[..., None]).any(-2)
    named = np.repeat(np.moveaxis(named, 2, 1), groups, axis=1) & (position <= position[:, None])
    near = (position <= position[:, None]) & (position > position[:, None] - WINDOW)
    complete = (np.arange(blocks) + 1) * SIZE - 1 <= position[:, None]

    def attend(key: Any, value: Any, visible: Any) -> Any:
        key, value = jnp.repeat(key, groups, axis=2), jnp.repeat(value, groups, axis=2)
        logits = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") / np.sqrt(size)
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", jnp.where(visible, weights, 0), value, precision="highest")

    means = [x[:, : blocks * SIZE].reshape(batch, blocks, SIZE, -1, size).mean(2) for x in (key, value)]
    parts = {"g_cmp": attend(*means, complete), "g_slc": attend(key, value, named), "g_swa": attend(key, value, near)}
    return sum(arrays[gate][..., None] * out for gate, out in parts.items())


def test_three_branches_and_all_their_gradients(arrays):
    indices = chosen(arrays["query"], arrays["key"])

    def pulled(function: Any) -> Any:
        out, pull = jax.vjp(function, arrays)
        return out, pull(jnp.cos(out))[0]

    out, gradients = jax.jit(lambda: pulled(run))()
    wanted, wanted_gradients = jax.jit(lambda: pulled(lambda arrays: dense(arrays, indices)))()
    assert_close(out, wanted, 2e-6)
    for name, gradient in gradients.items():
        assert_close(gradient, wanted_gradients[name], 1e-5, name)


def test_the_choice_is_the_documented_one(arrays):
    query, key = arrays["query"], arrays["key"]
    blocks = blocks_of(T, SIZE, None)
    means = block_means(key, SIZE, blocks, None)
    logits = jnp.einsum("bthd,bnhd->bthn", query, jnp.repeat(means, H // K, axis=2), precision="highest") / np.sqrt(D)
    complete = ((jnp.arange(8) + 1) * SIZE - 1)[None, None] <= jnp.arange(T)[:, None, None]
    lse = jax.nn.logsumexp(jnp.where(complete, logits, -jnp.inf), axis=-1)
    for count in (1, 2, 3, 4, 8):
        found = selection(query, means, lse, blocks, count=count)
        np.testing.assert_array_equal(found, chosen(query, key, count))


def test_equal_scores_choose_the_earlier_block():
    found = selection(
        jnp.zeros((1, 30, 2, 4)),
        jnp.zeros((1, 10, 1, 4)),
        jnp.log(jnp.maximum(jnp.arange(1.0, 31.0) // SIZE, 1.0))[None, :, None] * jnp.ones((1, 1, 2)),
        blocks_of(30, SIZE, None),
        count=5,
    )
    assert found[0, 29, 0].tolist() == [0, 1, 2, 8, 9]
    assert found[0, 4, 0].tolist() == [0, 1, -1, -1, -1]


def test_given_indices_are_used_as_given(arrays):
    given = generate_block_indices(B, T, K, COUNT, SIZE, seed=3)
    assert given.shape == (B, T, K, COUNT)
    out = run({**arrays, "block_indices": given})
    assert_close(out, dense(arrays, np.asarray(given)), 2e-6)
    alone = ejkernel.apply_native_sparse_attention(arrays["query"], arrays["key"], arrays["value"], given, block_size=SIZE)
    gates = {"g_cmp": jnp.zeros((B, T, H)), "g_slc": jnp.ones((B, T, H)), "g_swa": jnp.zeros((B, T, H))}
    assert_close(alone, dense({**arrays, **gates}, np.asarray(given)), 2e-6)
    only = ejkernel.native_sparse_attention(
        arrays["query"], arrays["key"], arrays["value"], block_indices=given, block_size=SIZE, block_counts=2
    )
    assert_close(only, dense({**arrays, **gates}, np.asarray(given[..., :2])), 2e-6)


def test_repeated_future_and_negative_indices(arrays):
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    once = jnp.broadcast_to(jnp.array([2, 0]), (B, T, K, 2))
    often = jnp.broadcast_to(jnp.array([0, 2, -7, 2, 1000, 2**31 - 1, 0, -1]), (B, T, K, 8))
    got = ejkernel.apply_native_sparse_attention(query, key, value, often, block_size=SIZE)
    assert_close(got, ejkernel.apply_native_sparse_attention(query, key, value, once, block_size=SIZE), 1e-6)
    future = jnp.full((B, T, K, 1), 7)
    out, lse = ejkernel.apply_native_sparse_attention(query, key, value, future, block_size=SIZE, return_lse=True)
    np.testing.assert_array_equal(out[:, : 7 * SIZE], 0)
    np.testing.assert_array_equal(lse[:, : 7 * SIZE], -np.inf)
    assert np.isfinite(np.asarray(lse[:, 7 * SIZE :])).all()


def test_packed_sequences_are_each_by_itself_in_one_program(arrays):
    first = {name: array[:1] for name, array in arrays.items()}
    traces = []

    @jax.jit
    def packed(arrays: Any, cu_seqlens: Any) -> Any:
        traces.append(1)
        out, pull = jax.vjp(lambda arrays: run(arrays, cu_seqlens=cu_seqlens), arrays)
        return out, pull(jnp.cos(out))[0]

    @jax.jit
    def alone(arrays: Any) -> Any:
        out, pull = jax.vjp(run, arrays)
        return out, pull(jnp.cos(out))[0]

    for bounds in ([0, 7, 7, 8, 20], [0, 1, 2, 21, 23], [0, 0, 0, 0, 0]):
        out, gradients = packed(first, jnp.array(bounds))
        np.testing.assert_array_equal(out[:, bounds[-1] :], 0)
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient[:, bounds[-1] :], 0, name)
        for start, end in itertools.pairwise(bounds):
            if end > start and end - start in (7, 12, 19):
                part = {name: array[:, start:end] for name, array in first.items()}
                wanted, wanted_gradients = alone(part)
                assert_close(out[:, start:end], wanted, 2e-6)
                for name, gradient in wanted_gradients.items():
                    assert_close(gradients[name][:, start:end], gradient, 1e-5, name)
    assert len(traces) == 1


def test_counts_per_query_concrete_and_traced(arrays):
    """The first so many of the documented order, not of the ascending one."""
    counts = jnp.asarray(np.random.default_rng(0).integers(0, 6, (B, T, K)))
    wanted = dense(arrays, chosen(arrays["query"], arrays["key"], np.asarray(counts)))
    assert_close(run(arrays, block_counts=counts), wanted, 2e-6)
    last = {name: array if name in ("key", "value") else array[:, -1:] for name, array in arrays.items()}
    step = run(last, block_counts=counts[:, -1:], kv_lens=jnp.full(B, T))
    assert_close(step, wanted[:, -1:], 2e-6)
    assert_close(jax.jit(lambda counts: run(arrays, block_counts=counts))(counts), wanted, 2e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_a_mesh(arrays, kind):
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    heads, gate = P("dp", None, "tp", None), P("dp", None, "tp")
    specs = (heads, heads, heads, gate, gate, None, None, None, gate)

    def loss(arrays: Any, **options: Any) -> Any:
        return jnp.sum(jnp.sin(run(arrays, **options)))

    wanted, wanted_gradients = jax.jit(jax.value_and_grad(loss))(arrays)
    with jax.set_mesh(mesh):
        got, gradients = jax.jit(jax.value_and_grad(lambda a: loss(a, mesh=mesh, in_specs=specs, out_specs=heads)))(arrays)
    assert_close(got, wanted, 1e-5)
    for name, gradient in gradients.items():
        assert_close(jax.device_get(gradient), wanted_gradients[name], 1e-5, name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_inputs_are_not_gathered(kind):
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = {"query": (4, 12, 4, 8), "key": (4, 12, 2, 8), "value": (4, 12, 2, 8), "g_cmp": (4, 12, 4)}
    arrays = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def pulled(arrays: Any) -> Any:
        return jax.value_and_grad(lambda arrays: jnp.sum(jnp.sin(run(arrays))))(arrays)

    wanted = jax.jit(pulled)(arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        spec = NamedSharding(mesh, P("dp", None, "tp"))
        arrays = {name: jax.device_put(array, spec) for name, array in arrays.items()}
        compiled = jax.jit(pulled).lower(arrays).compile()
        got = compiled(arrays)
    assert "all-gather" not in compiled.as_text()
    for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(jax.device_get(leaf), expected, 1e-5)


def test_historical_spelling(arrays):
    gates = {name: arrays[name] for name in ("g_cmp", "g_slc", "g_swa")}
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    got = ejkernel.native_spare_attention(
        q=q, k=k, v=v, **gates, block_counts=COUNT, block_size=SIZE, window_size=WINDOW, scale=0.5
    )
    np.testing.assert_array_equal(got, run(arrays, softmax_scale=0.5))
    form = ejkernel.create_default_executor()(ejkernel.NativeSparseAttention(), q, k, v, **gates, **OPTIONS, softmax_scale=0.5)
    np.testing.assert_array_equal(got, form)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"window_size": 0}, ValueError, "g_swa: got a gate, expected None without a window; pass window_size="),
        ({"window_size": -1}, ValueError, "window_size: got -1, expected a value >= 0"),
        ({"block_size": 0}, ValueError, "block_size: got 0, expected a value >= 1"),
        ({"block_counts": -1}, ValueError, "block_counts: got -1, expected a value >= 0"),
        (
            {"block_counts": np.ones((B, T), int)},
            ValueError,
            r"block_counts: got shape \(2, 23\), expected an int, or \[B,T,K\]",
        ),
        ({"g_cmp": np.ones((B, T, K), np.float32)}, ValueError, r"g_cmp: got shape \(2, 23, 2\), expected \[B,T,H\]"),
        ({"g_slc": np.ones((B, T, H), int)}, TypeError, "g_slc: got dtype int64, expected a floating type"),
        ({"cu_seqlens": np.array([0, T])}, ValueError, "query: got batch 2, expected batch 1 with cu_seqlens"),
        ({"cu_seqlens": np.array([0, T + 1])}, ValueError, "cu_seqlens: got 24 as its last entry"),
    ],
)
def test_mistakes(arrays, change, error, message):
    with pytest.raises(error, match=message):
        run(
            {**arrays, **{name: value for name, value in change.items() if name.startswith("g_")}},
            **{name: value for name, value in change.items() if not name.startswith("g_")},
        )


def _bound(length: int, heads: int = 4, slots: int = 4, block_size: int = 16, size: int = 32) -> Any:
    spec = jax.ShapeDtypeStruct
    found: list[Any] = []

    def bind(*arrays: Any) -> Any:
        found.append(get_operation("native_sparse_attention").canonicalise(*arrays, block_size=block_size))
        return 0

    key = spec((1, length, 2, size), jnp.float32)
    jax.eval_shape(bind, spec((1, length, heads, size), jnp.float32), key, key, spec((1, length, 2, slots), jnp.int32))
    call = found[0].call
    inputs = type(found[0].inputs)(*(spec(s.shape, s.dtype) for s in (call.query, call.key, call.value, call.block_indices)))
    return call, inputs


def _temporary_bytes(length: int, config: NativeSparseAttentionConfig) -> tuple[int, int]:
    """Of the forward and of the backward phase."""
    call, inputs = _bound(length)
    outputs = jax.eval_shape(lambda inputs: forward(_saving(call), inputs, config), inputs)
    first = jax.jit(lambda inputs: forward(call, inputs, config)).lower(inputs).compile()
    second = jax.jit(lambda inputs, outputs: backward(call, inputs, outputs, type(outputs)(outputs.out, None), config)).lower(
        inputs, outputs
    )
    return tuple(one.memory_analysis().temp_size_in_bytes for one in (first, second.compile()))


def _saving(call: Any) -> Any:
    return dataclasses.replace(call, save_residuals=True)


def test_memory_grows_with_the_length_and_stays_far_below_a_full_gather():
    config = NativeSparseAttentionConfig(16)
    short, long = _temporary_bytes(1024, config), _temporary_bytes(4096, config)
    gathered = 2 * 4096 * 2 * 4 * 16 * 32 * 4  # keys and values of all queries at once
    for phase, (few, many) in enumerate(zip(short, long, strict=True)):
        assert many < 4.3 * few, phase
        assert many < gathered / 6, phase
    call, inputs = _bound(4096)
    whole = jax.jit(lambda inputs: forward(call, inputs, NativeSparseAttentionConfig(4096))).lower(inputs).compile()
    assert whole.memory_analysis().temp_size_in_bytes > gathered
