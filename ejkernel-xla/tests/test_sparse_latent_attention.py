"""DeepSeek sparse attention on XLA: against dense latent attention, the indexer's choice, memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ejkernel
from ejkernel.operations import get_operation
from ejkernel_xla.sparse_latent_attention.config import SparseLatentAttentionConfig
from ejkernel_xla.sparse_latent_attention.kernel import backward, forward

B, T, H, K, R, NOPE, ROPE, V, INDEX_HEADS, INDEX_SIZE = 2, 19, 4, 2, 6, 5, 2, 3, 3, 4
NAMES = ("query", "key_value", "w_kc", "w_vc", "query_index", "key_index", "index_weights", "b_q", "b_k")
MOVING = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")


@pytest.fixture(scope="module")
def arrays() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (
        (B, T, H, NOPE),
        (B, T, R),
        (R, K, NOPE),
        (R, K, V),
        (B, T, INDEX_HEADS, INDEX_SIZE),
        (B, T, INDEX_SIZE),
        (B, T, INDEX_HEADS),
        (B, T, ROPE),
        (B, T, ROPE),
    )
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in zip(NAMES, shapes, strict=True)}


def run(arrays: dict[str, Any], **options: Any) -> jax.Array:
    return ejkernel.deepseek_attn(**arrays, **options)


def chosen(arrays: dict[str, Any], topk: int, causal: bool) -> np.ndarray:
    """bool `[B,T,T]` from float64 scores, one query at a time."""
    query, key, weights = (np.asarray(arrays[name], np.float64) for name in ("query_index", "key_index", "index_weights"))
    found = np.zeros((B, T, T), bool)
    for row, token in np.ndindex(B, T):
        seen = token + 1 if causal else T
        scores = weights[row, token] @ np.maximum(query[row, token] @ key[row, :seen].T, 0)
        found[row, token, np.argsort(-scores, kind="stable")[:topk]] = True
    return found


def dense(arrays: dict[str, Any], visible: Any) -> jax.Array:
    """Latent attention with its keys and values formed, under a dense mask."""
    key = jnp.einsum("bsr,rkd->bskd", arrays["key_value"], arrays["w_kc"], precision="highest")
    value = jnp.einsum("bsr,rkv->bskv", arrays["key_value"], arrays["w_vc"], precision="highest")
    query = arrays["query"]
    if "b_k" in arrays:
        if "b_q" in arrays:
            rope = arrays["b_q"] if arrays["b_q"].ndim == 4 else jnp.broadcast_to(arrays["b_q"][:, :, None], (B, T, H, ROPE))
            query = jnp.concatenate([query, rope], axis=-1)
        key = jnp.concatenate([key, jnp.broadcast_to(arrays["b_k"][:, :, None], (B, T, K, ROPE))], axis=-1)
    key, value = jnp.repeat(key, H // K, axis=2), jnp.repeat(value, H // K, axis=2)
    logits = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") / np.sqrt(query.shape[3])
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", weights, value, precision="highest")


def forms(arrays: dict[str, Any], form: str) -> dict[str, Any]:
    """The ways in which a rope part may come."""
    if form == "none":
        return {name: array for name, array in arrays.items() if name not in ("b_q", "b_k")}
    per_head = jax.random.normal(jax.random.key(1), (B, T, H, ROPE))
    if form == "inside":
        inside = jnp.concatenate([arrays["query"], per_head], axis=-1)
        return {**{name: array for name, array in arrays.items() if name != "b_q"}, "query": inside}
    return {**arrays, "b_q": per_head} if form == "per-head" else arrays


@pytest.mark.parametrize("form", ["none", "shared", "per-head", "inside"])
def test_all_tokens_equal_dense_latent_attention(arrays, form):
    given = forms(arrays, form)
    everything = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    assert_close(run(given, index_topk=T), dense(given, everything), 3e-6)
    assert_close(run(given, index_topk=10_000), dense(given, everything), 3e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_chosen_tokens_and_all_gradients(arrays, causal):
    visible = chosen(arrays, 6, causal)

    def pulled(function: Any) -> Any:
        out, pull = jax.vjp(function, arrays)
        return out, pull(jnp.cos(out))[0]

    out, gradients = jax.jit(lambda: pulled(lambda arrays: run(arrays, index_topk=6, causal=causal)))()
    wanted, wanted_gradients = jax.jit(lambda: pulled(lambda arrays: dense(arrays, visible)))()
    assert_close(out, wanted, 3e-6)
    for name in MOVING:
        assert_close(gradients[name], wanted_gradients[name], 1e-5, name)
    for name in NAMES[4:7]:
        np.testing.assert_array_equal(gradients[name], 0)
    scaled = run(arrays, index_topk=6, causal=causal, index_softmax_scale=3.0)
    np.testing.assert_array_equal(scaled, run(arrays, index_topk=6, causal=causal))


def test_equal_scores_choose_the_earlier_token(arrays):
    zeros = {**arrays, "index_weights": jnp.zeros((B, T, INDEX_HEADS))}
    first = np.tri(T, dtype=bool) & (np.arange(T) < 6)
    assert_close(run(zeros, index_topk=6), dense(arrays, np.broadcast_to(first, (B, T, T))), 3e-6)


def test_a_score_that_is_not_a_number_comes_last(arrays):
    broken = {**arrays, "key_index": arrays["key_index"].at[:, 2].set(jnp.nan)}
    visible = chosen({**arrays, "key_index": arrays["key_index"].at[:, 2].set(0.0)}, T, True)
    assert_close(run(broken, index_topk=T), dense(arrays, visible), 3e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_a_mesh(arrays, kind):
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    heads, per_token, matrix = P("dp", None, "tp", None), P("dp"), P(None, "tp", None)
    specs = (heads, per_token, matrix, matrix, per_token, per_token, per_token, per_token, per_token)

    def loss(arrays: Any, **options: Any) -> Any:
        return jnp.sum(jnp.sin(run(arrays, index_topk=6, **options)))

    wanted, wanted_gradients = jax.jit(jax.value_and_grad(loss))(arrays)
    with jax.set_mesh(mesh):
        got, gradients = jax.jit(jax.value_and_grad(lambda a: loss(a, mesh=mesh, in_specs=specs, out_specs=heads)))(arrays)
    assert_close(got, wanted, 1e-5)
    for name in MOVING:
        assert_close(jax.device_get(gradients[name]), wanted_gradients[name], 1e-5, name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_inputs_are_not_gathered(arrays, kind):
    def pulled(arrays: Any) -> Any:
        return jax.value_and_grad(lambda arrays: jnp.sum(jnp.sin(run(arrays, index_topk=6))))(arrays)

    wanted = jax.jit(pulled)(arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    matrix = P(None, "tp")
    specs = {name: P("dp") for name in NAMES} | {"query": P("dp", None, "tp"), "w_kc": matrix, "w_vc": matrix}
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
        compiled = jax.jit(pulled).lower(placed).compile()
        got = compiled(placed)
    assert "all-gather" not in compiled.as_text()
    for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(jax.device_get(leaf), expected, 1e-5)


def cached(arrays: dict[str, Any], first: int, last: int, lengths: Any, spare: int = 4) -> dict[str, Any]:
    """Tokens first to last of the queries, over a cache with room for more; what is past each row's length holds NaN."""
    found = {}
    for name, array in arrays.items():
        if name in ("key_value", "key_index", "b_k"):
            room = jnp.pad(array, [(0, 0), (0, spare), (0, 0)])
            found[name] = jnp.where(jnp.arange(T + spare)[None, :, None] < lengths[:, None, None], room, jnp.nan)
        else:
            found[name] = array if name in ("w_kc", "w_vc") else array[:, first:last]
    return found


@pytest.mark.parametrize("form", ["none", "shared", "per-head", "inside"])
@pytest.mark.parametrize("new", [1, 3])
def test_decoding_gives_what_the_whole_sequence_gives(arrays, form, new):
    """One token, or several of a draft, at the end of a cache; rows of other lengths, one of them shorter than index_topk."""
    given = forms(arrays, form)
    whole = run(given, index_topk=6)
    for end in (new, 5, T):
        lengths = jnp.full(B, end)
        got = jax.jit(lambda given, lengths: run(given, index_topk=6, kv_lens=lengths))(
            cached(given, end - new, end, lengths), lengths
        )
        assert_close(got, whole[:, end - new : end], 3e-6)
    lengths = jnp.array([7, 16])
    weights = ("w_kc", "w_vc")
    apart = [{name: x if name in weights else x[row : row + 1] for name, x in given.items()} for row in (0, 1)]
    rows = [cached(one, end - new, end, jnp.array([end])) for one, end in zip(apart, (7, 16), strict=True)]
    both = {n: rows[0][n] if n in weights else jnp.concatenate([rows[0][n], rows[1][n]]) for n in rows[0]}
    got = run(both, index_topk=6, kv_lens=lengths)
    for row, end in enumerate((7, 16)):
        assert_close(got[row], whole[row, end - new : end], 3e-6)


def test_decoding_reads_and_differentiates_only_chosen_tokens(arrays):
    lengths = jnp.array([T, 0])
    given = cached(arrays, T - 1, T, lengths)
    out, pull = jax.vjp(lambda given: run(given, index_topk=6, kv_lens=lengths), given)
    assert not np.any(out[1])
    gradients = pull(jnp.ones_like(out))[0]
    touched = np.any(np.asarray(gradients["key_value"]), axis=2)
    np.testing.assert_array_equal(touched[0, :T], chosen(arrays, 6, True)[0, T - 1])
    assert not touched[1].any() and not touched[:, T:].any()
    assert all(np.all(np.isfinite(gradients[name])) for name in MOVING)
    everything = run(given, index_topk=T, kv_lens=lengths, causal=False)
    assert_close(everything[0], dense(arrays, np.ones((B, T, T), bool))[0, -1:], 3e-6)


def test_an_indexer_in_float8(arrays):
    """What arrays were divided by stands in the weights and in key_index_scale."""
    stored = {name: arrays[name].astype("float8_e4m3fn") for name in NAMES[4:6]}
    exact = {name: array.astype(jnp.float32) for name, array in stored.items()}
    scale = jnp.asarray(2.0 ** np.random.default_rng(1).integers(-2, 3, (B, T)), jnp.float32)
    got = run({**arrays, **stored}, index_topk=6, key_index_scale=scale)
    wanted = run({**arrays, **exact, "key_index": exact["key_index"] * scale[..., None]}, index_topk=6)
    assert_close(got, wanted, 3e-6)
    assert float(jnp.abs(got - run({**arrays, **stored}, index_topk=6)).max()) > 1e-2
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    specs = tuple(None if name in ("w_kc", "w_vc") else P("dp") for name in NAMES)
    split = run({**arrays, **stored}, index_topk=6, key_index_scale=scale, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    assert_close(split, got, 3e-6)


def test_decoding_over_a_mesh(arrays):
    lengths = jnp.array([9, 17])
    given = cached(arrays, 0, 1, lengths)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    specs = tuple(None if name in ("w_kc", "w_vc") else P("dp") for name in NAMES)
    got = run(given, index_topk=4, kv_lens=lengths, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    assert_close(got, run(given, index_topk=4, kv_lens=lengths), 3e-6)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            {},
            {"kv_lens": jnp.array([T, T + 1])},
            ValueError,
            r"kv_lens: got values in \[19, 20\], expected values in \[0, 19\]",
        ),
        ({}, {"kv_lens": jnp.array([T])}, ValueError, r"kv_lens: got shape \(1,\), expected \(2,\) = \[B\]"),
        ({}, {"kv_lens": jnp.ones(B)}, TypeError, "kv_lens: got dtype float32, expected integers"),
        ({"key_value": np.ones((B, T + 1, R), np.float32)}, {}, ValueError, r"key_value: got .* = \[B,T,r\], r as in w_kc"),
        (
            {"key_value": np.ones((B, T + 1, R), np.float32)},
            {"kv_lens": jnp.array([T, T])},
            ValueError,
            r"key_index: got shape \(2, 19, 4\), expected \(2, 20, 4\) = \[B,S,E\]",
        ),
        ({"b_k": None}, {}, ValueError, "b_k: got None, expected the keys' rope part beside b_q"),
        ({"b_q": None}, {}, ValueError, "query: got head size 5, expected 7: the 5 channels of w_kc and 2 of b_k"),
        (
            {"w_vc": np.ones((R, 1, V), np.float32)},
            {},
            ValueError,
            r"w_vc: got shape \(6, 1, 3\), expected \(6, 2, 3\) = \[r,K,V\]",
        ),
        (
            {"w_kc": np.ones((R, 3, NOPE), np.float32)},
            {},
            ValueError,
            "query: got 4 heads, expected a multiple of the 3 key heads",
        ),
        (
            {"key_value": np.ones((B, T, R), np.float16)},
            {},
            TypeError,
            "key_value: got dtype float16, expected the query's dtype",
        ),
        (
            {"key_index": np.ones((B, T, 9), np.float32)},
            {},
            ValueError,
            r"key_index: got shape \(2, 19, 9\), expected .* \[B,T,E\]",
        ),
        (
            {},
            {"key_index_scale": jnp.ones((B, T + 1))},
            ValueError,
            r"key_index_scale: got shape \(2, 20\), expected \(2, 19\) = \[B,T\]",
        ),
        ({}, {"index_topk": 0}, ValueError, "index_topk: got 0, expected a value >= 1"),
        ({}, {"index_softmax_scale": -1.0}, ValueError, "index_softmax_scale: got -1.0, expected a value > 0"),
        ({}, {"causal": 1}, TypeError, "causal: got 1, expected True or False"),
    ],
)
def test_mistakes(arrays, change, options, error, message):
    with pytest.raises(error, match=message):
        run({**arrays, **change}, **options)


def test_class_form_and_explain(arrays):
    form = ejkernel.create_default_executor()(ejkernel.DeepSeekAttention(), **arrays, index_topk=6)
    np.testing.assert_array_equal(form, run(arrays, index_topk=6))
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    assert ejkernel.explain("deepseek_attn", **shapes, platform="xla").forward.operation == "sparse_latent_attention"


def _temporary_bytes(length: int, config: SparseLatentAttentionConfig) -> tuple[int, int]:
    """Of the forward and of the backward phase; 64 tokens of 32 channels for each of `length` queries of 4 heads."""
    spec, found = jax.ShapeDtypeStruct, []

    def bind(*arrays: Any) -> Any:
        found.append(get_operation("sparse_latent_attention").canonicalise(*arrays, return_lse=True).call)
        return 0

    shapes = (spec((1, length, 4, 32), jnp.float32), spec((1, length, 32), jnp.float32), spec((1, length, 64), jnp.int32))
    jax.eval_shape(bind, *shapes)
    call, inputs = found[0], get_operation("sparse_latent_attention").Inputs(*shapes)
    outputs = jax.eval_shape(lambda inputs: forward(call, inputs, config), inputs)
    first = jax.jit(lambda inputs: forward(call, inputs, config)).lower(inputs)
    second = jax.jit(lambda inputs, outputs: backward(call, inputs, outputs, outputs, config)).lower(inputs, outputs)
    return tuple(one.compile().memory_analysis().temp_size_in_bytes for one in (first, second))


def test_memory_grows_with_the_length_and_stays_far_below_a_full_gather():
    config = SparseLatentAttentionConfig(16)
    short, long = _temporary_bytes(1024, config), _temporary_bytes(4096, config)
    gathered = 4096 * 64 * 32 * 4  # the tokens of all queries at once
    for phase, (few, many) in enumerate(zip(short, long, strict=True)):
        assert many < 4.3 * few, phase
        assert many < gathered / 3, phase
    assert _temporary_bytes(4096, SparseLatentAttentionConfig(4096))[0] > gathered
