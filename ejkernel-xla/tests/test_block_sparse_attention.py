"""Block-sparse attention: the tiles that are visited, layouts, traced masks, meshes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ejkernel
from ejkernel import MaskInfo
from ejkernel.modules import BlockSparseAttention, block_sparse_layout, blocksparse_attention, flash_attention
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close

LENGTH, BLOCK = 96, 16


def problem(batch: int = 2, heads: int = 4, key_heads: int = 2, length: int = LENGTH, size: int = 8, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, heads, length, size), (batch, key_heads, length, size), (batch, key_heads, length, size))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def documents(*sizes: int, length: int = LENGTH) -> np.ndarray:
    ids = np.repeat(np.arange(len(sizes)), sizes)
    return np.concatenate([ids, np.full(length - len(ids), -1)]).astype(np.int32)


def dense(q, k, v, mask_info, **options):
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    return jnp.swapaxes(flash_attention(q, k, v, mask_info=mask_info, **options), 1, 2)


def check_same(sparse, full, arrays):
    """Outputs and all gradients of two functions of the same arrays."""
    for name, got, wanted in zip(
        ("output", "gradients"), value_and_gradients(sparse, arrays), value_and_gradients(full, arrays), strict=True
    ):
        for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            check_close(name, leaf, np.asarray(expected, np.float64), (FORWARD if name == "output" else GRADIENT)["float32"])


def value_and_gradients(function, arrays):
    @jax.jit
    def run(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return run(*arrays)


def brute_map(visible: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles of `[..., T, S]` hold a visible pair, and which hold visible pairs only."""
    rows, columns = (-(-size // block) for size in visible.shape[-2:])
    tiles = [
        [visible[..., i * block : (i + 1) * block, j * block : (j + 1) * block] for j in range(columns)] for i in range(rows)
    ]
    return tuple(np.array([[reduce(tile, (-2, -1)) for tile in row] for row in tiles]) for reduce in (np.any, np.all))


def window_and_sinks(query, key):
    return (key <= query) & ((key > query - 20) | (key < 4))


def visited(layout, keys: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """The layout's lists as maps `[n, tiles]` of its first example."""
    found = np.zeros((2, layout.key_tiles.shape[1], -(-keys // layout.kv_blocksize)), bool)
    for i, row in enumerate(np.asarray(layout.key_tiles[0])):
        for place, tile in enumerate(row[: int(layout.counts[0, i])]):
            found[0, i, tile], found[1, i, tile] = True, layout.full_tiles[0, i, place]
    return found[0], found[1]


@pytest.mark.parametrize("length", [LENGTH, 83])
@pytest.mark.parametrize("kind", ["causal", "documents", "window", "predicate", "dense"])
def test_lists_are_exactly_the_tiles_with_visible_pairs(kind, length):
    row, column = np.arange(length)[:, None], np.arange(length)[None]
    ids = documents(30, 7, 40, length=length)
    random = np.random.default_rng(1).random((length, length)) < 0.004
    seen, options = {
        "causal": (column <= row, {}),
        "documents": ((column <= row) & (ids[:, None] == ids) & (ids >= 0), {"mask_info": MaskInfo.from_segments(ids[None])}),
        "window": (np.abs(row - column) <= 17, {"causal": False, "sliding_window": 17}),
        "predicate": (window_and_sinks(row, column), {"mask_builder": window_and_sinks}),
        "dense": (random, {"causal": False, "mask_info": MaskInfo(random[None, None])}),
    }[kind]
    layout = block_sparse_layout(length, q_blocksize=BLOCK, kv_blocksize=BLOCK, **options)
    some, every = visited(layout, length)
    assert (some == brute_map(seen)[0]).all()
    assert (every == brute_map(seen)[1]).all()
    assert float(layout.density(length)) == pytest.approx(some.mean())


def test_layouts_of_heads():
    """From a mask of heads or a map of heads: each head lists its own tiles, and attends to what it sees alone."""
    q, k, v = problem()
    allowed = np.random.default_rng(2).random((1, q.shape[1], 6, 6)) < 0.4
    seen = np.kron(allowed, np.ones((BLOCK, BLOCK), bool))
    blocks = {"q_blocksize": BLOCK, "kv_blocksize": BLOCK, "causal": False}
    of_mask = block_sparse_layout(LENGTH, mask_info=MaskInfo(seen), per_head=True, **blocks)
    of_map = block_sparse_layout(LENGTH, mask_builder=allowed, **blocks)
    of_any = block_sparse_layout(LENGTH, mask_info=MaskInfo(seen), **blocks)
    for layout in (of_mask, of_map):
        np.testing.assert_array_equal(layout.counts, allowed.sum(-1))
        assert float(layout.density(LENGTH)) == pytest.approx(allowed.mean())
    np.testing.assert_array_equal(of_any.counts, allowed.any(1).sum(-1))

    def out_and_gradients(layout):
        run = lambda *arrays: blocksparse_attention(*arrays, qkv_layouts=layout, platform="xla")
        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(jnp.cos(out))

    for layout in (of_mask, of_map):
        for got, wanted in zip(out_and_gradients(layout), out_and_gradients(of_any), strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("kind", ["documents", "predicate", "map", "rows"])
def test_layout_gives_what_dense_attention_gives(kind):
    q, k, v = problem()
    ids = np.stack([documents(30, 7, 40), documents(96)])
    row, column = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    allowed = np.random.default_rng(2).random((6, 6)) < 0.5
    same = (ids[:, None, :, None] == ids[:, None, None]) & (ids >= 0)[:, None, :, None] & (column <= row)
    options, seen = {
        "documents": ({"mask_info": MaskInfo.from_segments(ids)}, same),
        "predicate": ({"mask_builder": window_and_sinks}, window_and_sinks(row, column)[None, None]),
        "map": (
            {"mask_builder": allowed, "causal": False},
            np.kron(allowed, np.ones((BLOCK, BLOCK), bool))[None, None],
        ),
        "rows": (
            {"mask_info": MaskInfo.from_segments(ids), "mask_builder": window_and_sinks},
            same & window_and_sinks(row, column),
        ),
    }[kind]
    layout = block_sparse_layout(LENGTH, q_blocksize=BLOCK, kv_blocksize=BLOCK, **options)
    bias, sinks = jnp.asarray(np.random.default_rng(3).standard_normal((1, 4, LENGTH, LENGTH)), jnp.float32), jnp.arange(4.0)

    def sparse(q, k, v, sinks, bias):
        return blocksparse_attention(q, k, v, softmax_aux=sinks, bias=bias, qkv_layouts=(layout,), platform="xla")

    def full(q, k, v, sinks, bias):
        return dense(q, k, v, MaskInfo(jnp.asarray(seen)), softmax_aux=sinks, bias=bias)

    check_same(sparse, full, (q, k, v, sinks, bias))
    if kind != "map":
        direct = blocksparse_attention(
            q, k, v, softmax_aux=sinks, bias=bias, **options, cfg={"q_blocksize": 32}, platform="xla"
        )
        check_close("without a layout", direct, np.asarray(full(q, k, v, sinks, bias), np.float64), FORWARD["float32"])


def test_what_is_said_beside_a_layout_holds_too():
    """Full tiles of the layout are no longer full when the call hides more."""
    q, k, v = problem()
    layout = block_sparse_layout(LENGTH, causal=False, q_blocksize=BLOCK, kv_blocksize=BLOCK)
    assert bool(layout.full_tiles.all())
    got = blocksparse_attention(q, k, v, qkv_layouts=layout, causal=True, sliding_window=(20, 0), platform="xla")
    wanted = dense(q, k, v, None, causal=True, sliding_window=(20, 0))
    check_close("output", got, np.asarray(wanted, np.float64), FORWARD["float32"])
    silent = blocksparse_attention(q, k, v, qkv_layouts=layout, platform="xla")
    check_close("output", silent, np.asarray(dense(q, k, v, None), np.float64), FORWARD["float32"])


def test_traced_segments_compile_once():
    q, k, v = problem()
    traces = []

    @jax.jit
    def run(segments):
        traces.append(None)
        info = MaskInfo.from_segments(segments)
        layout = block_sparse_layout(LENGTH, mask_info=info, q_blocksize=BLOCK, kv_blocksize=BLOCK)
        return blocksparse_attention(q, k, v, qkv_layouts=layout, platform="xla"), blocksparse_attention(
            q, k, v, mask_info=info, platform="xla", cfg={"q_blocksize": BLOCK, "kv_blocksize": BLOCK}
        )

    for sizes in ((96,), (30, 7, 40), (1, 1, 90), (10,), (0,)):
        ids = np.stack([documents(*sizes), documents(50, 20)])
        wanted = np.asarray(dense(q, k, v, MaskInfo.from_segments(ids), causal=True), np.float64)
        for got in run(ids):
            check_close(f"{sizes}", got, wanted, FORWARD["float32"])
    assert len(traces) == 1 and run._cache_size() == 1


def test_an_example_of_the_batch_visits_its_own_tiles():
    """The loops' trip counts are sums of the lists: a predicate that counts runs once for every visited tile."""
    q, k, v = problem(batch=2)
    ids = np.stack([documents(*[8] * 12), documents(48, 48)])
    calls = []

    def counting(query, key):
        jax.debug.callback(lambda: calls.append(None))
        return (query - key) * 0 == 0

    layout = block_sparse_layout(LENGTH, mask_info=MaskInfo.from_segments(ids), q_blocksize=BLOCK, kv_blocksize=BLOCK)
    assert layout.counts.sum(1).tolist() == [6, 12]
    layout = type(layout)(layout.mask_info, layout.key_tiles, jnp.zeros_like(layout.full_tiles), BLOCK, BLOCK, counting)
    jax.block_until_ready(blocksparse_attention(q, k, v, qkv_layouts=layout, platform="xla"))
    jax.effects_barrier()
    assert len(calls) == 18


def test_plain_variant_agrees():
    q, k, v = problem()
    layout = block_sparse_layout(LENGTH, mask_builder=window_and_sinks, q_blocksize=BLOCK, kv_blocksize=BLOCK)

    def run(platform):
        return lambda q, k, v: blocksparse_attention(q, k, v, qkv_layouts=layout, platform=platform)

    check_same(run("xla.plain"), run("xla"), (q, k, v))


def test_memory_is_linear_in_the_length():
    """No score matrix is kept: twice the length needs about twice the memory."""

    def peak(length: int) -> int:
        q, k, v = problem(1, 2, 2, length)
        run = jax.grad(
            lambda q: blocksparse_attention(
                q, k, v, mask_builder=window_and_sinks, cfg={"q_blocksize": 64, "kv_blocksize": 64}, platform="xla"
            ).sum()
        )
        return jax.jit(run).lower(q).compile().memory_analysis().temp_size_in_bytes

    assert peak(4096) < 2.6 * peak(2048)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh(kind):
    """Batch and heads split, a mask and a layout of the whole batch, sinks that follow the heads; as the client calls it."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    q, k, v = problem()
    info = MaskInfo.from_segments(np.stack([documents(30, 7, 40), documents(96)]))
    layout = block_sparse_layout(LENGTH, mask_info=info, q_blocksize=BLOCK, kv_blocksize=BLOCK)
    spec, sinks = P("dp", "tp", None, None), jnp.arange(4.0)
    wanted = np.asarray(dense(q, k, v, info, causal=True, softmax_aux=sinks), np.float64)
    for given in ({"mask_info": info}, {"qkv_layouts": layout}):
        run = jax.jit(
            lambda q, k, v, sinks, given=given: blocksparse_attention(
                q, k, v, softmax_aux=sinks, mesh=mesh, in_specs=(spec, spec, spec, P("tp"), P(None)), out_specs=spec, **given
            )
        )
        check_close("output", run(q, k, v, sinks), wanted, FORWARD["float32"])
        assert not re.findall("all-gather", run.lower(q, k, v, sinks).compile().as_text())


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_lists_of_heads_on_a_mesh(kind, members):
    """They are split with the heads."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    q, k, v = problem()
    allowed = np.random.default_rng(4).random((members, q.shape[1], 6, 6)) < 0.4
    layout = block_sparse_layout(LENGTH, mask_builder=allowed, causal=False, q_blocksize=BLOCK, kv_blocksize=BLOCK)
    wanted = blocksparse_attention(q, k, v, qkv_layouts=layout)
    spec = P("dp", "tp", None, None)
    run = jax.jit(lambda *a: blocksparse_attention(*a, qkv_layouts=layout, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    np.testing.assert_allclose(run(q, k, v), wanted, atol=1e-6)
    assert not re.findall("all-gather", run.lower(q, k, v).compile().as_text())


def test_class_form_and_explain():
    q, k, v = problem()
    assert BlockSparseAttention()(q, k, v).shape == q.shape
    explanation = ejkernel.explain("blocksparse_attention", q, k, v, mask_builder=window_and_sinks)
    assert explanation.forward.chosen.id == "xla"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_builder": 3}, "mask_builder: got 3, expected a function of positions"),
        ({"mask_builder": np.ones((2, 2), bool)}, r"mask_builder: got a map of shape \(1, 2, 2\), expected \[1, 1\]"),
        ({"qkv_layouts": 3}, "qkv_layouts: got int, expected a layout made by block_sparse_layout"),
        ({"qkv_layouts": "short"}, "qkv_layouts: got a layout of 1 blocks of queries, expected 6 for T = 96"),
        ({"qkv_layouts": "own", "mask_builder": window_and_sinks}, "mask_builder: got given beside qkv_layouts"),
        ({"fused_backward": 1}, "fused_backward"),
        ({"causal": "no"}, "causal: got 'no', expected True or False"),
    ],
)
def test_errors(options, message):
    q, k, v = problem()
    made = {"short": 5, "own": LENGTH}
    if options.get("qkv_layouts") in made:
        length = made[options["qkv_layouts"]]
        options = {**options, "qkv_layouts": block_sparse_layout(length, q_blocksize=BLOCK, kv_blocksize=BLOCK)}
    with pytest.raises((ValueError, TypeError), match=message):
        blocksparse_attention(q, k, v, **options)


def test_predicates_with_traced_arrays_are_refused():
    q, k, v = problem()
    with pytest.raises(TypeError, match="put what is only known at run time into mask_info"):
        jax.jit(lambda w: blocksparse_attention(q, k, v, mask_builder=lambda a, b: a - b < w))(jnp.int32(3))
