"""`ring_attention(strategy="all_to_all")` on several devices equals attention on one: outputs, log-sum-exp and every gradient."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ejkernel
from ejkernel.masks import MaskInfo

T = 32
SP = P(None, "sp")


def normal(shape: tuple[int, ...], seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def problem(heads: int = 4, key_heads: int = 2, keys: int = T, sinks=None, bias=None, dtype=jnp.float32) -> dict:
    shapes = {"query": (2, T, heads, 8), "key": (2, keys, key_heads, 8), "value": (2, keys, key_heads, 6)}
    shapes |= {"softmax_aux": sinks, "bias": bias}
    return {name: normal(shape, dtype=dtype) for name, shape in shapes.items() if shape is not None}


def mesh_of(*sizes: int, names: tuple[str, ...] = ("sp",), kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = int(np.prod(sizes))
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices, this machine has {len(jax.devices())}")
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[:devices])


def split(mesh: jax.sharding.Mesh, spec: P = SP, **options):
    options = {"axis_name": "sp", "return_lse": True, "out_specs": (spec, spec), **options}
    return functools.partial(
        ejkernel.ring_attention, strategy="all_to_all", mesh=mesh, in_specs=(spec,) * 3, platform="xla", **options
    )


def local(**options):
    return functools.partial(ejkernel.flash_attention, return_lse=True, platform="xla", **options)


def pulled(run, given: dict):
    """Outputs and gradients of every array."""

    def loss(arrays):
        out, lse = run(**arrays)
        seen = jnp.where(lse > -jnp.inf, lse, 0)
        total = jnp.sum(out * normal(out.shape, 7, out.dtype)).astype(jnp.float32) + jnp.sum(seen * normal(lse.shape, 8))
        return total, (out, lse)

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(given)
    return outputs, gradients


def assert_same(got, wanted, tolerance: float = 1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other[np.isfinite(other)]).max()))


def segments(seed: int) -> np.ndarray:
    """Four packed sequences and some padding."""
    rng = np.random.default_rng(seed)
    return np.stack([np.where(np.arange(T) < T - cut, np.sort(rng.integers(0, 4, T)), -1) for cut in (0, 9)])


def everything(mask_heads: int = 4) -> MaskInfo:
    return MaskInfo(
        dense=np.random.default_rng(3).random((2, mask_heads, T, T)) < 0.8,
        query_segments=segments(1),
        key_segments=segments(1),
        key_lengths=np.array([T - 3, 17]),
        causal=True,
        causal_offset=3,
    )


CASES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "causal cross": ({"causal": True}, {"keys": 16}),
    "window": ({"causal": True, "sliding_window": (6, 0)}, {}),
    "chunks": ({"chunk_size": 12}, {}),
    "soft cap": ({"causal": True, "logits_soft_cap": 1.5}, {}),
    "prefix": ({"mask_info": MaskInfo(causal=True, prefix=11)}, {}),
    "sinks by head": ({"causal": True}, {"sinks": (4, 2)}),
    "sinks of all heads": ({"causal": True}, {"sinks": (1, 3)}),
    "bias by head": ({"causal": True}, {"bias": (2, 4, T, T)}),
    "bias by head and key": ({}, {"bias": (1, 4, 1, T), "sinks": (4,)}),
    "bias by query": ({}, {"bias": (2, 1, T, 1)}),
    "bias of one row": ({}, {"bias": (2, 1, 1, T)}),
    "bias of two axes": ({"causal": True}, {"bias": (T, T)}),
    "packed": ({"mask_info": MaskInfo.from_segments(segments(2)), "causal": True}, {}),
    "padding": ({"mask_info": MaskInfo.from_lengths(np.array([T - 3, 5]), T)}, {}),
    "mask of all heads": ({"mask_info": everything(1)}, {}),
    "everything": (
        {"mask_info": everything(), "sliding_window": (20, 20), "logits_soft_cap": 3.0},
        {"sinks": (4,), "bias": (1, 4, T, T)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_four_devices(name):
    """Two key heads: every device holds a copy of one."""
    options, arrays = CASES[name]
    given = problem(**arrays)
    assert_same(pulled(split(mesh_of(4), **options), given), pulled(local(**options), given))


@pytest.mark.parametrize("name", ("causal", "window", "everything"))
def test_two_devices(name):
    options, arrays = CASES[name]
    given = problem(**arrays)
    assert_same(pulled(split(mesh_of(2), **options), given), pulled(local(**options), given))


@pytest.mark.parametrize(("devices", "heads", "key_heads"), [(2, 4, 4), (4, 4, 1), (4, 8, 8), (4, 12, 6), (8, 8, 2), (2, 6, 3)])
def test_grouped_heads(devices, heads, key_heads):
    """Key heads that the devices divide are split, others repeated; every query head keeps its own."""
    given = problem(heads, key_heads)
    assert_same(pulled(split(mesh_of(devices), causal=True), given), pulled(local(causal=True), given))


def test_positions_travel_with_their_tokens():
    order = np.random.default_rng(5).permutation(T)
    positions = jnp.asarray(order)[None]
    info = MaskInfo(query_positions=positions, key_positions=positions)
    given = problem()
    out, lse = jax.jit(split(mesh_of(4), causal=True, mask_info=info))(**{name: x[:, order] for name, x in given.items()})
    wanted, wanted_lse = local(causal=True)(**given)
    assert_same((out, lse), (wanted[:, order], wanted_lse[:, order]))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_batch_heads_and_sequence_split_at_once(kind):
    mesh = mesh_of(2, 2, 2, names=("dp", "sp", "tp"), kind=kind)
    given = problem(sinks=(4,), bias=(2, 4, T, T))
    run = split(mesh, P("dp", "sp", "tp"), mask_info=everything())
    assert_same(pulled(run, given), pulled(local(mask_info=everything()), given))


def test_a_sequence_over_two_mesh_axes():
    given = problem(heads=8)
    run = split(mesh_of(4, 2, names=("a", "b")), P(None, ("a", "b")), causal=True, axis_name=("a", "b"))
    assert_same(pulled(run, given), pulled(local(causal=True), given))


@pytest.mark.parametrize("check_vma", (True, False))
def test_inside_a_shard_map_of_ones_own(check_vma):
    """Gradients of replicated sinks are summed over the devices; a shard's mask holds its own tokens."""
    info, given = jnp.asarray(segments(2)), problem(sinks=(4,), bias=(2, 4, T, T))
    specs = {"query": SP, "key": SP, "value": SP, "softmax_aux": P(), "bias": P(None, None, "sp")}

    @functools.partial(jax.shard_map, mesh=mesh_of(4), in_specs=(specs, SP), out_specs=(SP, SP), check_vma=check_vma)
    def shards(arrays, own):
        options = {"mask_info": MaskInfo.from_segments(own), "axis_name": "sp", "causal": True, "return_lse": True}
        return ejkernel.ring_attention(**arrays, **options, strategy="all_to_all", platform="xla")

    got = pulled(lambda **arrays: shards(arrays, info), given)
    assert_same(got, pulled(local(causal=True, mask_info=MaskInfo.from_segments(info)), given))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=lambda dtype: dtype.dtype.name)
def test_narrow_dtypes(dtype):
    """Exchanges move numbers: the output is that of one device, and copies of a key head add up to its gradient."""
    given = problem(dtype=dtype)
    (out, _), gradients = pulled(split(mesh_of(4), causal=True), given)
    assert out.dtype == dtype and all(gradient.dtype == dtype for gradient in gradients.values())
    (wanted, _), wanted_gradients = pulled(local(causal=True), given)
    assert_same((out, gradients), (wanted, wanted_gradients), 2 * float(jnp.finfo(dtype).eps))


def test_float64():
    with jax.enable_x64(True):
        given = problem(dtype=jnp.float64)
        out, wanted = (jax.jit(run)(**given)[0] for run in (split(mesh_of(4), causal=True), local(causal=True)))
        assert out.dtype == jnp.float64
        assert_same(out, wanted, 1e-13)


def test_a_traced_window():
    """Layers of one scan may differ in it."""
    given = problem()
    window = jnp.array([3, 9, T])

    def layers(run):
        return jax.jit(lambda: jax.lax.map(lambda limit: run(**given, sliding_window=(limit, 0))[0], window))()

    assert_same(layers(split(mesh_of(4), causal=True)), layers(local(causal=True)))


def test_vmap_and_remat():
    given = problem(keys=16)
    copies = {name: jnp.stack([x, x * 0.5, -x]) for name, x in given.items()}

    def gradients(run):
        loss = jax.checkpoint(lambda arrays: jnp.sum(jnp.sin(run(**arrays)[0])))
        return jax.jit(jax.vmap(jax.grad(loss)))(copies)

    assert_same(gradients(split(mesh_of(4), causal=True)), gradients(local(causal=True)))


def test_forward_mode():
    given = problem(sinks=(4,))
    tangents = {name: normal(x.shape, 11) for name, x in given.items()}
    with ejkernel.use(custom_gradients=False):
        got, wanted = (
            jax.jit(lambda a, b, run=run: jax.jvp(lambda arrays: run(**arrays), (a,), (b,)))(given, tangents)
            for run in (split(mesh_of(4), causal=True), local(causal=True))
        )
    assert_same(got, wanted)


def test_what_no_query_sees_may_hold_nan():
    info = MaskInfo.from_lengths(np.array([T, 20]), T)
    given = problem()
    dirty, clean = ({name: x.at[1, 20:].set(hidden) for name, x in given.items()} for hidden in (jnp.nan, 0))
    run = split(mesh_of(4), causal=True, mask_info=info)
    got = pulled(run, dirty)
    assert np.isfinite(np.asarray(got[0][1][0])).all()
    assert_same(got, pulled(run, clean))


def collectives(text: str) -> dict[str, int]:
    names = ("all-to-all", "all-gather", "all-reduce", "collective-permute", "reduce-scatter")
    return {name: count for name in names if (count := len(re.findall(rf" = .* {name}(?:-start)?\(", text)))}


def placed(mesh: jax.sharding.Mesh, given: dict) -> dict:
    return {name: jax.device_put(x, jax.NamedSharding(mesh, SP)) for name, x in given.items()}


def test_four_exchanges_forward_and_eight_with_gradients():
    """Query, key, value and output; nothing else is sent."""
    mesh = mesh_of(4)
    run = split(mesh, causal=True, return_lse=False, out_specs=SP)
    given = placed(mesh, problem())
    forward = jax.jit(lambda arrays: run(**arrays)).lower(given).compile().as_text()
    assert collectives(forward) == {"all-to-all": 4}
    both = jax.jit(jax.value_and_grad(lambda arrays: jnp.sum(jnp.sin(run(**arrays)))))
    found = collectives(both.lower(given).compile().as_text())
    assert found == {"all-to-all": 8, "all-reduce": 1}  # the sum that is the loss


def test_only_segments_are_gathered():
    mesh = mesh_of(4)
    given, info = placed(mesh, problem()), jax.device_put(jnp.asarray(segments(2)), jax.NamedSharding(mesh, SP))

    def run(arrays, own):
        info = MaskInfo.from_segments(own)
        return split(mesh, causal=True, return_lse=False, out_specs=SP, mask_info=info)(**arrays)

    text = jax.jit(run).lower(given, info).compile().as_text()
    gathers = re.findall(r" = (.*) all-gather(?:-start)?\(", text)
    assert gathers and all(re.fullmatch(r"\(?(?:s32\[[\d,]*\](?:\{[\d,]*\})?(?:, )?)+\)?", shape) for shape in gathers)


def test_one_device_and_no_axis_are_local_attention():
    given = problem(heads=2)
    wanted = local(causal=True)(**given)
    np.testing.assert_array_equal(split(mesh_of(1), causal=True)(**given)[0], wanted[0])
    out = ejkernel.RingAttention()(**given, causal=True, strategy="all_to_all", platform="xla")
    np.testing.assert_array_equal(out, wanted[0])


REFUSED = {
    "heads": (
        {"heads": 6, "key_heads": 2},
        {},
        r"query: got 6 heads, expected a multiple of the 4 devices of axis_name=\('sp',\); use strategy='ring'",
    ),
    "zigzag": (
        {},
        {"layout": "zigzag"},
        "layout: got 'zigzag', expected 'contiguous' with strategy='all_to_all'; keep the natural",
    ),
    "a strategy": ({}, {"strategy": "ulysses"}, "strategy: got 'ulysses', expected one of ring, all_to_all"),
    "sinks of other heads": ({"sinks": (2,)}, {}, r"softmax_aux: got shape \(2,\), expected .* with H = 4 query heads"),
    "half of a bias": (
        {"bias": (1, 1, T, T // 2)},
        {},
        r"bias: got shape \(1, 1, 8, 16\), expected .*\(B, H, T, S\) = \(2, 4, 8, 32\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    arrays, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        split(mesh_of(4))(**problem(**arrays), **options)
