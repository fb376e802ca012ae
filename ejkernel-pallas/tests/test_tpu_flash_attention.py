"""`flash_attention` on TPU without one: several tiles of every mask under Pallas's TPU interpreter, lists of tiles, refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import ejkernel
from ejkernel.operations.flash_attention import pairs, reference
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.plugin import Target
from ejkernel.testing.problem import as_reference
from ejkernel_pallas.tpu.flash_attention import capability, config, kernel, tiles

V6E = Target("tpu", "TPU v6 lite")
FORWARD = config.ForwardConfig(128, 256, 128)
BACKWARD = config.BackwardConfig(256, 128, 128, 256)
BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 2, 200, 300, 2, 1, 16, 24
FIELDS = ("query", "key", "value", "bias", "softmax_aux")


def segments(length):
    rng = np.random.default_rng(length)
    ids = np.sort(rng.integers(0, 4, (BATCH, length)), axis=1).astype(np.int32)
    ids[1, -70:] = -1
    return ids


def positions(length):
    return (np.arange(length)[None] + np.array([[0], [57]])).astype(np.int32)


def problem(queries=QUERIES, keys=KEYS, dtype="float32", bias=None, sinks=None, mask=None, seed=0, **options):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    arrays = {
        "query": normal(BATCH, queries, HEADS, SIZE),
        "key": normal(BATCH, keys, KEY_HEADS, SIZE),
        "value": normal(BATCH, keys, KEY_HEADS, VALUE_SIZE),
    }
    if bias is not None:
        arrays["bias"] = normal(*bias)
    if sinks is not None:
        arrays["softmax_aux"] = normal(*sinks)
    if mask is not None:
        arrays["mask"] = jnp.asarray(rng.random(mask) < 0.5)
    bound = OPERATION.canonicalise(**arrays, **options)
    call = dataclasses.replace(bound.call, save_residuals=True)
    cotangents = FlashAttentionOutputs(
        normal(BATCH, queries, HEADS, VALUE_SIZE),
        jnp.asarray(rng.standard_normal((BATCH, queries, HEADS)), jnp.float32) if call.return_lse else None,
    )
    return call, bound.inputs, cotangents


def run(call, inputs, cotangents, forward=FORWARD, backward=BACKWARD):
    @jax.jit
    def both(inputs, cotangents):
        outputs = kernel.forward(call, inputs, forward)
        return outputs, kernel.backward(call, inputs, outputs, cotangents, backward)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        return both(inputs, cotangents)


def exact(call, inputs, cotangents):
    inputs, cotangents = as_reference(inputs), as_reference(cotangents)
    with np.errstate(all="ignore"):
        outputs = reference.forward(call, inputs)
        return outputs, reference.backward(call, inputs, outputs, cotangents)


def assert_close(got, wanted, limit):
    pairs_of_values = [("out", got[0].out, wanted[0].out), ("lse", got[0].lse, wanted[0].lse)]
    pairs_of_values += [(name, getattr(got[1], name), getattr(wanted[1], name)) for name in FIELDS]
    for name, value, exact_value in pairs_of_values:
        assert (value is None) == (exact_value is None), name
        if value is not None:
            value, finite = np.asarray(value, np.float64), np.isfinite(exact_value)
            np.testing.assert_array_equal(value[~finite], exact_value[~finite], err_msg=name)
            value, exact_value = value[finite], exact_value[finite]
            error = np.linalg.norm(value - exact_value) / max(np.linalg.norm(exact_value), 1e-30)
            assert error < limit, (name, error)


SEGMENTS = {"query_segments": segments(QUERIES), "key_segments": segments(KEYS)}
POSITIONS = {"query_positions": positions(QUERIES), "key_positions": positions(KEYS)}
PROBLEMS = {
    "full": {},
    "causal": {"causal": True, "return_lse": True},
    "empty-rows": {"queries": 300, "keys": 140, "causal": True, "causal_alignment": "bottom_right"},
    "window-cap": {"sliding_window": (40, 25), "logits_soft_cap": 2.0},
    "chunk-prefix": {"causal": True, "chunk_size": 150, "prefix": 70},
    "segments-causal": {**SEGMENTS, "causal": True},
    "segments-positions": {**SEGMENTS, **POSITIONS, "chunk_size": 90, "sliding_window": (50, 60)},
    "positions": {**POSITIONS, "causal": True},
    "mask": {"mask": (2, 1, QUERIES, KEYS), "causal": True},
    "bias": {"bias": (1, HEADS, QUERIES, KEYS), "causal": True, "logits_soft_cap": 3.0},
    "bias-keys": {"bias": (BATCH, 1, 1, KEYS), "sinks": (HEADS, 2), "sliding_window": (100, 30)},
    "bias-queries": {"bias": (1, 1, QUERIES, 1), "return_lse": True, "softmax_scale": -0.3},
    "dropout": {"dropout_seed": np.array([3, 5], np.uint32), "dropout_prob": 0.4, "causal": True, "sinks": (HEADS, 1)},
    "dropout-bias": {"dropout_seed": np.array([7, 1], np.uint32), "dropout_prob": 0.2, "bias": (1, 1, QUERIES, KEYS)},
    "bias-one": {"bias": (1, HEADS, 1, 1), "return_lse": True, "sinks": (1, 1)},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_several_tiles(name):
    values = problem(**PROBLEMS[name])
    assert_close(run(*values), exact(*values), 3e-6)


def test_bfloat16():
    values = problem(dtype="bfloat16", causal=True, bias=(1, 1, QUERIES, KEYS), sinks=(HEADS, 1))
    assert_close(run(*values), exact(*values), 1e-2)


@pytest.mark.parametrize("sizes", [(128, 128, 128), (256, 512, 128)])
def test_configs_agree(sizes):
    values = problem(causal=True, **SEGMENTS)
    block_q, block_k, block_k_compute = sizes
    configs = config.ForwardConfig(block_q, block_k, block_k_compute), config.BackwardConfig(block_q, block_k, block_k, block_q)
    assert_close(run(*values, *configs), exact(*values), 3e-6)


def test_same_inputs_same_bits():
    values = problem(causal=True, bias=(1, 1, 1, KEYS))
    first, second = run(*values), run(*values)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def test_nothing_leaks_from_hidden_places():
    """NaN in padding, in hidden keys and in the gradient of rows that see nothing."""
    call, inputs, cotangents = problem(query_lengths=np.array([200, 120]), key_lengths=np.array([260, 133]), causal=True)
    spoilt = inputs._replace(
        query=inputs.query.at[1, 120:].set(jnp.nan),
        key=inputs.key.at[0, 260:].set(jnp.nan).at[1, 133:].set(jnp.inf),
        value=inputs.value.at[0, 260:].set(-jnp.inf).at[1, 133:].set(jnp.nan),
    )
    spoilt_cotangents = FlashAttentionOutputs(cotangents.out.at[1, 120:].set(jnp.nan))
    wanted = exact(call, inputs, FlashAttentionOutputs(cotangents.out.at[1, 120:].set(0.0)))
    assert_close(run(call, spoilt, spoilt_cotangents), wanted, 3e-6)


@pytest.mark.parametrize("field", ["key", "value"])
def test_a_visible_nan_is_seen(field):
    call, inputs, cotangents = problem(causal=True)
    array = getattr(inputs, field).at[0, 150, 0, 3].set(jnp.nan)
    outputs, gradients = run(call, inputs._replace(**{field: array}), cotangents)
    visible = np.isnan(outputs.out)
    assert visible[0, 150:].all() and not visible[0, :150].any() and not visible[1].any()
    assert np.isnan(gradients.query[0, 150:]).all() and not np.isnan(gradients.query[0, :150]).any()


@pytest.mark.parametrize("name", ["causal", "window-cap", "chunk-prefix", "empty-rows", "segments-causal", "positions", "mask"])
@pytest.mark.parametrize("by_key", [False, True])
def test_lists_hold_every_visible_tile_once(name, by_key):
    call, inputs, _ = problem(**PROBLEMS[name])
    block_q, block_k = 128, 64
    found = tiles.tiles_of(call, inputs, block_q, block_k, by_key=by_key)
    packed = np.asarray(found.packed).reshape(-1, found.length)
    assert packed.size == tiles.list_length(call, block_q, block_k, by_key=by_key)
    visible = np.broadcast_to(pairs.visible(call, inputs, np), (BATCH, HEADS, *map(len, (inputs.query[0], inputs.key[0])))).any(
        1
    )
    for batch, row in enumerate(packed):
        for member in range(BATCH) if not found.per_batch else (batch,):
            visited = row[(row & (tiles.FULL | tiles.PARTIAL)) != 0]
            owners, others = tiles.owner_of(visited), tiles.other_of(visited)
            assert len(set(zip(owners.tolist(), others.tolist(), strict=True))) == len(visited)
            covered = np.zeros_like(visible[member])
            for owner, other, flags in zip(owners, others, visited, strict=True):
                i_query, i_key = (other, owner) if by_key else (owner, other)
                part = np.s_[i_query * block_q : (i_query + 1) * block_q, i_key * block_k : (i_key + 1) * block_k]
                covered[part] = True
                assert not flags & tiles.FULL or (visible[member][part].all() and covered[part].size == block_q * block_k)
            assert covered[visible[member]].all()
            active = row[(row & 15) != 0]
            starts = tiles.owner_of(active[(active & tiles.FIRST) != 0])
            ends = tiles.owner_of(active[(active & tiles.LAST) != 0])
            owner_count = tiles.blocks(visible.shape[2], block_k) if by_key else tiles.blocks(visible.shape[1], block_q)
            np.testing.assert_array_equal(starts, np.arange(owner_count))
            np.testing.assert_array_equal(ends, np.arange(owner_count))


def test_a_kernel_has_the_branches_that_its_list_needs():
    """Whole tiles alone, tiles with something hidden alone, both; any, where arrays decide."""
    sizes = {"queries": 256, "keys": 256}
    wanted = {
        tiles.FULL: problem(**sizes),
        tiles.PARTIAL: problem(**sizes, sliding_window=(20, 20)),
        tiles.FULL | tiles.PARTIAL: problem(**sizes, causal=True),
    }
    for kinds, (call, inputs, _) in wanted.items():
        assert tiles.tiles_of(call, inputs, 128, 128).kinds == kinds
    call, inputs, _ = problem(**SEGMENTS)
    assert tiles.tiles_of(call, inputs, 128, 128).kinds == tiles.FULL | tiles.PARTIAL


def test_causal_lists_skip_half():
    call, _, _ = problem(queries=2048, keys=2048, causal=True)
    assert tiles.list_length(call, 128, 128) == 16 * 17 // 2
    windowed, _, _ = problem(queries=2048, keys=2048, causal=True, sliding_window=(127, 0))
    assert tiles.list_length(windowed, 128, 128) == 31


def test_supports_refuses_with_reasons():
    call, _, _ = problem(causal=True)

    def ask(target=V6E, **changes):
        return capability.supports(dataclasses.replace(call, **changes), target)

    assert ask() is None
    assert "the target is gpu" in ask(Target("gpu", "NVIDIA H200", "9.0"))
    assert "value is float16" in ask(value=dataclasses.replace(call.value, dtype="float16"))
    assert "one dtype" in ask(value=dataclasses.replace(call.value, dtype="bfloat16"))
    many = dataclasses.replace(call.query, shape=(1 << 14, *call.query.shape[1:]))
    assert "streams" in ask(query=many, dropout_rate=0.5)
    assert "normalize_output" in ask(normalize_output=False)
    assert "logits_dtype is float16" in ask(logits_dtype="float16")
    wide = dataclasses.replace(call.query, shape=(*call.query.shape[:3], 40_000))
    assert "VMEM" in ask(
        Target("tpu", "TPU v4"), query=wide, key=dataclasses.replace(wide, shape=(*call.key.shape[:3], 40_000))
    )
    long = {name: dataclasses.replace(getattr(call, name), shape=(2, 1 << 21, 4, 16)) for name in ("query", "key", "value")}
    assert "tokens are more than" in ask(**long)


def test_public_function_lowers_for_tpu():
    query = jax.ShapeDtypeStruct((1, 1024, 4, 128), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 1024, 2, 128), jnp.bfloat16)

    def loss(query, key, value):
        return ejkernel.flash_attention(query, key, value, causal=True, platform="pallas").astype(jnp.float32).sum()

    with ejkernel.use(target=V6E):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, key)
        text = traced.lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 3
    assert "ejkernel.flash_attention[pallas.tpu]" in text


def test_shard_map_checks_varying_axes():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    query = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    bias = jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.bfloat16)
    sinks = jax.ShapeDtypeStruct((2,), jnp.bfloat16)

    def gradients(query, bias, sinks, segments):
        def loss(query, bias, sinks):
            options = {"mask_info": ejkernel.MaskInfo.from_segments(segments), "causal": True, "platform": "pallas"}
            out = ejkernel.flash_attention(query, query, query, bias=bias, softmax_aux=sinks, **options)
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(query, bias, sinks)

    replicated = jax.sharding.PartitionSpec()
    specs = (spec, replicated, replicated, spec)
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(spec, replicated, replicated))
    with ejkernel.use(target=V6E):
        text = jax.jit(sharded).trace(query, bias, sinks, segments).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 4


@functools.cache
def _every_target():
    return [Target("tpu", kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "a new kind")]


@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (576, 512)])
def test_every_config_is_legal(sizes):
    call, _, _ = problem(causal=True)
    query, key, value = ((1, 8192, 8, sizes[0]), (1, 8192, 8, sizes[0]), (1, 8192, 8, sizes[1]))
    shapes = zip(("query", "key", "value"), (query, key, value), strict=True)
    specs = {name: dataclasses.replace(call.query, shape=shape) for name, shape in shapes}
    call = dataclasses.replace(call, **specs)
    for target in _every_target():
        for found in (*config.forward_space(call, target), *config.backward_space(call, target)):
            fields = dataclasses.asdict(found)
            assert all(value % 128 == 0 and 128 <= value <= 2048 for value in fields.values()), found
        assert all(f.block_k % f.block_k_compute == 0 for f in config.forward_space(call, target))
