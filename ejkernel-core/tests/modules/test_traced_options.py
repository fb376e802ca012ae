"""Windows, scales and weights of losses that the running program knows, as in a scan over layers, against static ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import ejkernel
from ejkernel.operations.paged_attention.cases import cache_of

WINDOWS, SCALES = (3, 20, 1, 5), (0.4, 0.3, 0.5, 0.35)
CU_SEQLENS = jnp.array([0, 5, 5, 11])


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def heads(*, batch: int = 2, length: int = 12) -> tuple[jax.Array, ...]:
    return tuple(normal(batch, length, count, 8, seed=count + number) for number, count in enumerate((4, 2, 2)))


def pages() -> dict[str, jax.Array]:
    described, used = cache_of(np.random.default_rng(0), ((3, 7), (1, 9), (2, 2)), page_size=4)
    cache = {name: normal(*used.shape, 2, 8, seed=seed) for seed, name in enumerate(("key_cache", "value_cache"))}
    return {**cache, **{name: jnp.asarray(array) for name, array in described.items()}}


PAGES = pages()
QUERY, KEY, VALUE = heads()


def dense(x: Any, window: Any, scale: Any) -> Any:
    return ejkernel.flash_attention(x, KEY, VALUE, causal=True, sliding_window=(window, 0), softmax_scale=scale)


def both_sides(x: Any, window: Any, scale: Any) -> Any:
    return ejkernel.flash_attention(x, KEY, VALUE, sliding_window=window, softmax_scale=scale)


def chunks(x: Any, size: Any, scale: Any) -> Any:
    return ejkernel.flash_attention(x, KEY, VALUE, causal=True, chunk_size=size, softmax_scale=scale)


def varlen(x: Any, window: Any, scale: Any) -> Any:
    key, value = KEY[0, :11], VALUE[0, :11]
    out = ejkernel.flash_attn_varlen(x[0, :11], key, value, CU_SEQLENS, causal=True, sliding_window=(window, 0), sm_scale=scale)
    return jnp.broadcast_to(jnp.pad(out, ((0, 1), (0, 0), (0, 0)))[None], x.shape)


def varlen_chunks(x: Any, size: Any, scale: Any) -> Any:
    key, value = KEY[0, :11], VALUE[0, :11]
    out = ejkernel.flash_attn_varlen(x[0, :11], key, value, CU_SEQLENS, causal=True, chunk_size=size, sm_scale=scale)
    return jnp.broadcast_to(jnp.pad(out, ((0, 1), (0, 0), (0, 0)))[None], x.shape)


def paged(x: Any, window: Any, scale: Any) -> Any:
    out = ejkernel.unified_attention(x[0, :6], **PAGES, sliding_window=window, softmax_scale=scale)
    return jnp.broadcast_to(jnp.pad(out, ((0, 6), (0, 0), (0, 0)))[None], x.shape)


def tiles(x: Any, window: Any, scale: Any) -> Any:
    arrays = (jnp.swapaxes(array, 1, 2) for array in (x, KEY, VALUE))
    return jnp.swapaxes(ejkernel.blocksparse_attention(*arrays, sliding_window=(window, 0), softmax_scale=scale), 1, 2)


def listed_tiles(x: Any, window: Any, scale: Any) -> Any:
    arrays = (jnp.swapaxes(array, 1, 2) for array in (x, KEY, VALUE))
    given = {"mask_builder": jnp.ones((1, 1), bool), "sliding_window": (window, 0), "softmax_scale": scale}
    return jnp.swapaxes(ejkernel.blocksparse_attention(*arrays, **given), 1, 2)


LAYERS = {f.__name__: f for f in (dense, both_sides, chunks, varlen, varlen_chunks, paged, tiles, listed_tiles)}


def in_a_loop(layer: Any, x: Any, scales: Any) -> Any:
    for window, scale in zip(WINDOWS, scales, strict=True):
        x = x + layer(x, window, scale)
    return x


def in_a_scan(layer: Any, x: Any, scales: Any) -> Any:
    return jax.lax.scan(lambda x, given: (x + layer(x, *given), None), x, (jnp.array(WINDOWS), scales))[0]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_scanned_layers_equal_a_loop_of_static_ones(layer):
    weight = normal(*QUERY.shape, seed=9)

    def loss(run: Any) -> Any:
        return lambda x, scales: (run(layer, x, scales) * weight).sum()

    found, (d_x, d_scales) = jax.jit(jax.value_and_grad(loss(in_a_scan), (0, 1)))(QUERY, jnp.array(SCALES))
    wanted, expected = jax.value_and_grad(loss(in_a_loop))(QUERY, SCALES)
    assert jnp.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert jnp.allclose(d_x, expected, rtol=1e-4, atol=1e-4)
    step = 3e-3
    for number in range(4):
        ends = [loss(in_a_loop)(QUERY, tuple(s + (n == number) * h for n, s in enumerate(SCALES))) for h in (step, -step)]
        assert d_scales[number] == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_mapped_windows_and_scales(layer):
    found = jax.vmap(layer, (None, 0, 0))(QUERY, jnp.array(WINDOWS), jnp.array(SCALES))
    for number, (window, scale) in enumerate(zip(WINDOWS, SCALES, strict=True)):
        assert jnp.allclose(found[number], layer(QUERY, window, scale), atol=1e-5)


def test_traced_limits_hold_beside_static_ones_and_masks():
    info = ejkernel.MaskInfo.from_segments(jnp.array([[0] * 7 + [1] * 4 + [-1]] * 2), window=(6, None))
    query_positions = jnp.arange(12)[None] + 2
    positioned = ejkernel.MaskInfo(query_positions=query_positions, key_positions=jnp.arange(12)[None], chunk_size=5)

    def run(mask: Any, window: Any, chunk: Any) -> Any:
        given = {"mask_info": mask, "sliding_window": (window, 1), "chunk_size": chunk}
        return ejkernel.flash_attention(QUERY, KEY, VALUE, **given)

    for mask, chunk in ((info, 4), (positioned, 5)):
        assert jnp.allclose(jax.jit(run)(mask, 3, chunk), run(mask, 3, chunk), atol=1e-6)


def test_padding_that_holds_nan_does_not_reach_the_gradient_of_the_scale():
    lengths = ejkernel.MaskInfo.from_lengths(jnp.array([9, 12]), 12)
    query = QUERY.at[0, 9:].set(jnp.nan)

    def loss(scale: Any, query: Any) -> Any:
        return (ejkernel.flash_attention(query, KEY, VALUE, mask_info=lengths, softmax_scale=scale) ** 2).sum()

    gradient = jax.grad(loss)(0.5, query)
    assert jnp.isfinite(gradient)
    assert jnp.allclose(gradient, jax.grad(loss)(0.5, QUERY), rtol=1e-5)


def test_the_default_scale_changes_no_bit_of_a_rounded_query():
    query, key, value = (array.astype(jnp.bfloat16) for array in (QUERY, KEY, VALUE))
    found = jax.jit(lambda scale: ejkernel.flash_attention(query, key, value, softmax_scale=scale))(jnp.float32(8**-0.5))
    assert (found == ejkernel.flash_attention(query, key, value)).all()


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("given", [{"sliding_window": (5, 0), "causal": True}, {"sliding_window": (5, 3)}, {"chunk_size": 3}])
def test_rings(layout, given):
    query, key, value = heads(length=16)
    specs = PartitionSpec(None, "sp")
    order = (lambda x: ejkernel.zigzag_shard(x, 4)) if layout == "zigzag" else (lambda x: x)
    name = next(name for name in given if name != "causal")

    def ring(query: Any, limit: Any, scale: Any) -> Any:
        over = {
            "axis_name": "sp",
            "mesh": mesh_of((4,), ("sp",)),
            "in_specs": (specs,) * 3,
            "out_specs": specs,
            "layout": layout,
        }
        arrays = (order(array) for array in (query, key, value))
        return ejkernel.ring_attention(*arrays, **{**given, name: limit}, softmax_scale=scale, **over)

    def local(query: Any, scale: Any) -> Any:
        return order(ejkernel.flash_attention(query, key, value, **given, softmax_scale=scale))

    assert jnp.allclose(jax.jit(ring)(query, given[name], 0.4), local(query, 0.4), atol=1e-5)
    found = jax.jit(jax.grad(lambda *a: (ring(*a) ** 2).sum(), (0, 2)))(query, given[name], 0.4)
    wanted = jax.grad(lambda *a: (local(*a) ** 2).sum(), (0, 1))(query, 0.4)
    for one, other in zip(found, wanted, strict=True):
        assert jnp.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_over_a_mesh():
    specs = PartitionSpec("dp", None, "tp")

    def run(window: Any, scale: Any, **over: Any) -> Any:
        return ejkernel.flash_attention(QUERY, KEY, VALUE, sliding_window=(window, 0), softmax_scale=scale, **over)

    over = {"mesh": mesh_of((2, 2), ("dp", "tp")), "in_specs": (specs,) * 3, "out_specs": specs}
    found = jax.jit(jax.grad(lambda scale, window: (run(window, scale, **over) ** 2).sum()))(0.4, 3)
    assert jnp.allclose(found, jax.grad(lambda scale: (run(3, scale) ** 2).sum())(0.4), rtol=1e-4)


def test_paged_attention_over_a_mesh():
    heads_split = PartitionSpec(None, "tp")
    cache = PartitionSpec(None, None, "tp")
    over = {"mesh": mesh_of((2,), ("tp",)), "in_specs": (heads_split, cache, cache, None, None, None), "out_specs": heads_split}

    def run(window: Any, **over: Any) -> Any:
        return ejkernel.unified_attention(QUERY[0, :6], **PAGES, sliding_window=window, **over)

    assert jnp.allclose(jax.jit(lambda window: run(window, **over))(3), run(3), atol=1e-6)


STEPS = {
    "unified_attention": lambda limit, **o: ejkernel.unified_attention(QUERY[0, :6], **PAGES, **limit, **o),
    "page_attention": lambda limit, **o: ejkernel.page_attention(
        QUERY[0, :3],
        PAGES["key_cache"],
        PAGES["value_cache"],
        PAGES["kv_lens"],
        PAGES["block_tables"],
        layout="pthd",
        **limit,
        **o,
    ),
    "prefill_page_attention": lambda limit, **o: ejkernel.prefill_page_attention(
        QUERY[0, :3],
        PAGES["key_cache"],
        PAGES["value_cache"],
        PAGES["kv_lens"][1:2],
        PAGES["block_tables"][1],
        layout="pthd",
        **limit,
        **o,
    ),
    "chunked_prefill_paged_decode": lambda limit, **o: ejkernel.chunked_prefill_paged_decode(
        QUERY[0, :6], KEY[0, :6], VALUE[0, :6], **PAGES, **limit, **o
    )[0],
    "decode_attention": lambda limit, **o: ejkernel.decode_attention(
        QUERY[0, :2], KEY[0], VALUE[0], jnp.array([[0, 1, 2], [3, 4, 5]]), jnp.array([9, 12]), page_size=4, **limit, **o
    )[0],
    "ragged_decode_attention": lambda limit, **o: ejkernel.ragged_decode_attention(
        QUERY[:, 0], KEY, VALUE, jnp.array([1, 3]), jnp.array([12, 7]), **limit, **o
    ),
    "flash_attention": lambda limit, **o: ejkernel.flash_attention(
        QUERY[:2, :1],
        PAGES["key_cache"],
        PAGES["value_cache"],
        block_tables=PAGES["block_tables"][:2],
        mask_info=ejkernel.MaskInfo(key_lengths=PAGES["kv_lens"][:2], sizes=(2, 1, 12)),
        **limit,
        **o,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_serving(name):
    step, limits = STEPS[name], [{"sliding_window": (2, 0)}]
    limits += [] if name == "flash_attention" else [{"chunk_size": 4}]
    for given in limits:
        found = jax.jit(lambda limit, scale: step(limit, softmax_scale=scale))(given, 0.4)
        assert jnp.allclose(found, step(given, softmax_scale=0.4), atol=1e-5)


def test_latent_serving():
    described = {"query_start_loc": jnp.array([0, 3, 4]), "kv_lens": jnp.array([7, 9])}
    cache = normal(6, 4, 1, 256)
    arrays = (normal(4, 3, 16), normal(4, 3, 8), normal(4, 16), normal(4, 8), cache)

    def step(window: Any, scale: Any) -> Any:
        tables, used = jnp.array([0, 1, 2, 3, 4, 5]), jnp.array([0, 0, 2])
        given = {**described, "block_tables": tables, "distribution": used, "sliding_window": window, "softmax_scale": scale}
        return ejkernel.multi_latent_ragged_page_attention(*arrays, **given)[0]

    assert jnp.allclose(jax.jit(step)(3, 0.4), step(3, 0.4), atol=1e-5)
    assert not jnp.allclose(step(3, 0.4), step(9, 0.4), atol=1e-3)


LATENTS = (normal(1, 8, 16), normal(16, 2, 6), normal(16, 2, 5))
INDEX = (normal(1, 8, 2, 4), normal(1, 8, 4, seed=1), normal(1, 8, 2, seed=2))
FOUR = tuple(normal(1, 8, 4, 8, seed=seed) for seed in range(3))
DECAYS = {"beta": jnp.full((1, 8, 4), 0.5), "decay": -jnp.ones((1, 8, 4))}

SCALED = {
    "attention": lambda s: ejkernel.attention(*FOUR, softmax_scale=s)[1],
    "scaled_dot_product_attention": lambda s: ejkernel.scaled_dot_product_attention(*FOUR, scale=s),
    "flash_mla": lambda s: ejkernel.flash_mla(FOUR[0][..., :6], *LATENTS, softmax_scale=s),
    "native_sparse_attention": lambda s: ejkernel.native_sparse_attention(
        *FOUR, g_cmp=jnp.ones((1, 8, 4)), block_size=2, block_counts=8, window_size=3, softmax_scale=s
    ),
    "apply_native_sparse_attention": lambda s: ejkernel.apply_native_sparse_attention(
        *FOUR, jnp.zeros((1, 8, 4, 1), jnp.int32), block_size=4, softmax_scale=s
    ),
    "deepseek_attn": lambda s: ejkernel.deepseek_attn(FOUR[0][..., :6], *LATENTS, *INDEX, index_topk=3, softmax_scale=s),
    "recurrent_attention": lambda s: ejkernel.recurrent_attention(*FOUR, softmax_scale=s),
    "lightning_attention": lambda s: ejkernel.lightning_attention(*FOUR, layer_idx=1, num_layers=3, softmax_scale=s),
    "gated_delta_rule": lambda s: ejkernel.gated_delta_rule(*FOUR, **DECAYS, use_qk_l2norm=True, softmax_scale=s),
    "gated_delta_product": lambda s: ejkernel.gated_delta_product(
        FOUR[0][:, :4], *FOUR[1:], DECAYS["beta"], num_householder=2, softmax_scale=s
    ),
    "mlstm": lambda s: ejkernel.mlstm(*FOUR, DECAYS["beta"], DECAYS["decay"], softmax_scale=s)[0],
    "softmax": lambda s: ejkernel.softmax(FOUR[0], scale=s),
}


@pytest.mark.parametrize("function", SCALED.values(), ids=SCALED)
def test_a_traced_scale_and_its_gradient(function):
    scale, step = 0.6, 3e-3
    static = function(scale)
    weight = normal(*static.shape, seed=7)
    found, gradient = jax.jit(jax.value_and_grad(lambda s: (function(s) * weight).sum()))(scale)
    assert jnp.allclose(jax.jit(function)(scale), static, atol=1e-5)
    assert found == pytest.approx(float((static * weight).sum()), rel=1e-4, abs=1e-4)
    ends = [float((function(scale + h) * weight).sum()) for h in (step, -step)]
    assert gradient == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-2, abs=1e-2)
    assert abs(gradient) > 1e-3


def test_a_positive_factor_of_the_index_chooses_the_same_tokens():
    def run(factor: Any) -> Any:
        return ejkernel.deepseek_attn(FOUR[0][..., :6], *LATENTS, *INDEX, index_topk=3, index_softmax_scale=factor)

    assert jnp.allclose(jax.jit(run)(0.3), run(0.3), atol=1e-5)


@pytest.mark.parametrize("slopes", ["linear", "minimax", "bailing"])
def test_the_index_of_a_layer(slopes):
    def run(layer: Any) -> Any:
        return ejkernel.lightning_attention(*FOUR, layer_idx=layer, num_layers=3, slopes=slopes)

    found = jax.lax.map(run, jnp.arange(3))
    for layer in range(3):
        assert jnp.allclose(found[layer], run(layer), atol=1e-5)


def test_softmax_of_masked_places_that_hold_nan():
    x = normal(3, 7).at[0, 2].set(-jnp.inf).at[1, 3].set(jnp.nan)
    where = jnp.ones((3, 7), bool).at[1, 3].set(False)
    weight = normal(3, 7, seed=1)

    def loss(scale: Any, x: Any = x) -> Any:
        return (ejkernel.softmax(x, where=where, scale=scale) * weight).sum()

    gradient = jax.grad(loss)(0.7)
    assert gradient == pytest.approx(float(loss(0.71) - loss(0.69)) / 0.02, rel=1e-2)
    assert jax.jit(loss)(0.7) == pytest.approx(float(loss(0.7)), abs=1e-5)


LOGITS, HIDDEN, HEAD = normal(3, 7), normal(3, 5), normal(5, 7)
LOSSES = {
    "logits": {"logits": LOGITS},
    "hidden": {"hidden": HIDDEN, "lm_head_weight": HEAD},
    "class weights": {"logits": LOGITS, "class_weights": jnp.arange(1.0, 8.0)},
    "rows": {"logits": LOGITS, "reduction": "none"},
}


@pytest.mark.parametrize("given", LOSSES.values(), ids=LOSSES)
def test_z_loss_and_label_smoothing(given):
    targets = jnp.array([1, -100, 3])

    def loss(penalty: Any, smoothing: Any) -> Any:
        return ejkernel.fused_cross_entropy(targets=targets, z_loss=penalty, label_smoothing=smoothing, **given).loss.sum()

    assert jax.jit(loss)(0.1, 0.2) == pytest.approx(float(loss(0.1, 0.2)), rel=1e-5)
    assert jax.jit(loss)(0.0, 0.0) == pytest.approx(float(loss(0.0, 0.0)), rel=1e-5)
    by_penalty, by_smoothing = jax.jit(jax.grad(loss, (0, 1)))(0.1, 0.2)
    assert by_penalty == pytest.approx(float(loss(0.2, 0.2) - loss(0.0, 0.2)) / 0.2, rel=1e-3)
    assert by_smoothing == pytest.approx(float(loss(0.1, 0.3) - loss(0.1, 0.1)) / 0.2, rel=1e-3)


def test_z_loss_and_label_smoothing_of_a_vocabulary_that_is_split():
    targets = jnp.array([1, -100, 6])
    logits = normal(3, 8)
    specs = {"in_specs": (PartitionSpec(None, "tp"), PartitionSpec()), "out_specs": PartitionSpec()}

    def loss(penalty: Any, smoothing: Any, **over: Any) -> Any:
        return ejkernel.fused_cross_entropy(logits, targets, z_loss=penalty, label_smoothing=smoothing, **over).loss

    over = {"mesh": mesh_of((2,), ("tp",)), **specs}
    found, gradients = jax.jit(jax.value_and_grad(lambda *a: loss(*a, **over), (0, 1)))(0.1, 0.2)
    wanted, expected = jax.value_and_grad(loss, (0, 1))(0.1, 0.2)
    assert found == pytest.approx(float(wanted), rel=1e-5)
    assert jnp.allclose(jnp.stack(gradients), jnp.stack(expected), rtol=1e-4)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_temperature(direction):
    def loss(heat: Any, student: Any) -> Any:
        return ejkernel.fused_kl_divergence(student, normal(3, 7, seed=1), temperature=heat, direction=direction).loss

    def from_hidden(heat: Any) -> Any:
        given = {"student_hidden": HIDDEN, "student_head": HEAD, "teacher_logits": LOGITS}
        return ejkernel.fused_kl_divergence(**given, temperature=heat, direction=direction).loss

    assert jax.jit(loss)(1.7, LOGITS) == pytest.approx(float(loss(1.7, LOGITS)), rel=1e-5)
    assert jax.jit(from_hidden)(1.7) == pytest.approx(float(from_hidden(1.7)), rel=1e-4)
    assert jnp.allclose(jax.jit(jax.grad(loss, 1))(1.7, LOGITS), jax.grad(loss, 1)(1.7, LOGITS), atol=1e-6)
    with pytest.raises(TypeError, match=r"^temperature: it has no gradient; pass jax.lax.stop_gradient\(temperature\)"):
        jax.grad(loss)(1.7, LOGITS)
    assert jax.grad(lambda heat, x: loss(jax.lax.stop_gradient(heat), x))(1.7, LOGITS) == 0
