"""Ring attention over 2, 4 and 8 devices equals attention on one: outputs, log-sum-exp and every gradient."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ejkernel
from ejkernel import kernel_registry
from ejkernel.masks import MaskInfo
from ejkernel.plugin import resolve

T = 32
SP = P(None, "sp")
BOTH = (SP, SP)


def normal(shape: tuple[int, ...], seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def problem(keys: int = T, sinks: tuple[int, ...] | None = None, bias: tuple[int, ...] | None = None) -> list[jax.Array]:
    shapes = ((2, T, 4, 8), (2, keys, 2, 8), (2, keys, 2, 6), sinks, bias)
    return [None if shape is None else normal(shape) for shape in shapes]


def mesh_of(devices: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices, this machine has {len(jax.devices())}")
    return jax.make_mesh((devices,), ("sp",), axis_types=(kind,), devices=jax.devices()[:devices])


def ring(devices: int, layout: str = "contiguous", **options):
    """`ring_attention` with natural order outside, whatever the layout inside."""

    def order(array, axis=1):
        return ejkernel.zigzag_shard(array, devices, axis) if layout == "zigzag" and array.shape[axis] > 1 else array

    def run(query, key, value, sinks, bias):
        bias = None if bias is None else order(order(bias, -1), -2)
        out, lse = ejkernel.ring_attention(
            order(query),
            order(key),
            order(value),
            softmax_aux=sinks,
            bias=bias,
            axis_name="sp",
            layout=layout,
            return_lse=True,
            **{"mesh": mesh_of(devices), "in_specs": (SP, SP, SP), "out_specs": BOTH, "platform": "xla", **options},
        )
        if layout == "zigzag":
            return ejkernel.zigzag_unshard(out, devices), ejkernel.zigzag_unshard(lse, devices)
        return out, lse

    return run


def local(**options):
    def run(query, key, value, sinks, bias):
        return ejkernel.flash_attention(
            query, key, value, bias=bias, softmax_aux=sinks, return_lse=True, platform="xla", **options
        )

    return run


def pulled(run, given):
    """Outputs and gradients of every array."""
    present = [i for i, array in enumerate(given) if array is not None]

    def loss(*arrays):
        out, lse = run(*arrays)
        seen = jnp.where(lse > -jnp.inf, lse, 0)
        total = jnp.sum(out * normal(out.shape, 7, out.dtype)).astype(jnp.float32) + jnp.sum(seen * normal(lse.shape, 8))
        return total, (out, lse)

    gradients, outputs = jax.jit(jax.grad(loss, present, has_aux=True))(*given)
    return outputs, gradients


def assert_same(got, wanted, tolerance: float = 1e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def segments(seed: int) -> np.ndarray:
    """Four packed sequences and some padding."""
    rng = np.random.default_rng(seed)
    return np.stack([np.where(np.arange(T) < T - cut, np.sort(rng.integers(0, 4, T)), -1) for cut in (0, 9)])


def full_mask() -> MaskInfo:
    return MaskInfo(
        dense=np.random.default_rng(3).random((2, 1, T, T)) < 0.8,
        query_segments=segments(1),
        key_segments=segments(1),
        key_lengths=np.array([T - 3, 17]),
        causal=True,
        causal_offset=3,
    )


CASES = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {}),
    "causal, 8 keys behind": ({"mask_info": MaskInfo(causal=True, causal_offset=-8)}, {}),
    "cross": ({}, {"keys": 16}),
    "causal cross": ({"causal": True}, {"keys": 16}),
    "window": ({"sliding_window": (5, 9)}, {}),
    "causal window": ({"causal": True, "sliding_window": 6}, {}),
    "long window": ({"causal": True, "sliding_window": 19}, {}),
    "soft cap": ({"causal": True, "logits_soft_cap": 1.5}, {}),
    "chunks within shards": ({"chunk_size": 4, "causal": True}, {}),
    "chunks across shards": ({"chunk_size": 12}, {}),
    "prefix": ({"mask_info": MaskInfo(causal=True, prefix=11)}, {}),
    "sinks": ({"causal": True}, {"sinks": (4, 2)}),
    "bias": ({"causal": True}, {"bias": (2, 4, T, T)}),
    "bias per key, with sinks": ({}, {"bias": (1, 4, 1, T), "sinks": (4,)}),
    "bias per query": ({"causal": True}, {"bias": (2, 1, T, 1)}),
    "bias of two axes": ({"causal": True}, {"bias": (T, T)}),
    "packed": ({"mask_info": MaskInfo.from_segments(segments(2)), "causal": True}, {}),
    "padding": ({"mask_info": MaskInfo.from_lengths(np.array([T - 3, 5]), T), "causal": True}, {"sinks": (1, 3)}),
    "no length": ({"mask_info": MaskInfo(query_lengths=np.array([T, 0]), key_lengths=np.array([0, 9]))}, {}),
    "everything": (
        {"mask_info": full_mask(), "sliding_window": (20, 20), "logits_soft_cap": 3.0},
        {"sinks": (4,), "bias": (1, 4, T, T)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_four_devices(name):
    options, arrays = CASES[name]
    given = problem(**arrays)
    assert_same(pulled(ring(4, **options), given), pulled(local(**options), given))


@pytest.mark.parametrize("devices", (2, 8))
@pytest.mark.parametrize("name", ("causal", "causal window", "everything"))
def test_two_and_eight_devices(name, devices):
    options, arrays = CASES[name]
    given = problem(**arrays)
    assert_same(pulled(ring(devices, **options), given), pulled(local(**options), given))


ZIGZAG = {
    "causal": ({}, {"sinks": (4,), "bias": (1, 4, T, T)}),
    "soft cap": ({"logits_soft_cap": 2.0}, {}),
    "window": ({"sliding_window": 6}, {}),
    "chunks": ({"chunk_size": 5}, {}),
    "padding": ({"mask_info": MaskInfo(key_lengths=np.array([T - 3, 5]))}, {"bias": (2, 4, 1, T)}),
}


@pytest.mark.parametrize("devices", (2, 4, 8))
@pytest.mark.parametrize("name", ZIGZAG)
def test_zigzag(name, devices):
    if devices != 4 and name != "causal":
        pytest.skip("the other masks are tried on four devices")
    options, arrays = ZIGZAG[name]
    given = problem(**arrays)
    assert_same(pulled(ring(devices, "zigzag", causal=True, **options), given), pulled(local(causal=True, **options), given))


def test_zigzag_keeps_segments_with_their_tokens():
    info = segments(2)
    there = jnp.asarray(ejkernel.zigzag_shard(jnp.asarray(info), 4))
    given = problem()
    got = pulled(ring(4, "zigzag", causal=True, mask_info=MaskInfo.from_segments(there)), given)
    assert_same(got, pulled(local(causal=True, mask_info=MaskInfo.from_segments(info)), given))


def test_positions_carry_the_truth():
    """With positions given, tokens may lie in any order."""
    order = np.random.default_rng(5).permutation(T)
    query, key, value, *_ = problem()
    positions = jnp.asarray(order)[None]
    info = MaskInfo(query_positions=positions, key_positions=positions)
    given = [query[:, order], key[:, order], value[:, order], None, None]
    (out, lse), _ = pulled(ring(4, causal=True, mask_info=info), given)
    wanted, wanted_lse = local(causal=True)(query, key, value, None, None)
    assert_same((out, lse), (wanted[:, order], wanted_lse[:, order]))


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16), ids=lambda dtype: dtype.dtype.name)
def test_narrow_dtypes_accumulate_in_float32(dtype):
    given = [normal((1, 64, 2, 16), i, dtype) for i in range(3)] + [None, None]
    wide = [None if array is None else array.astype(jnp.float32) for array in given]
    got, wanted = pulled(ring(8, causal=True), given), pulled(local(causal=True), wide)
    assert got[0][0].dtype == dtype and got[1][1].dtype == dtype
    eps = float(jnp.finfo(dtype).eps)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.abs(one - other).max() <= 3 * eps * max(np.abs(other).max(), 1)


def test_what_no_query_sees_may_hold_nan():
    query, key, value, *_ = problem()
    info = MaskInfo.from_lengths(np.array([T, 20]), T)
    dirty = [array.at[1, 20:].set(jnp.nan) for array in (query, key, value)] + [None, None]
    clean = [array.at[1, 20:].set(0) for array in (query, key, value)] + [None, None]
    outputs, gradients = pulled(ring(4, causal=True, mask_info=info), dirty)
    wanted = pulled(ring(4, causal=True, mask_info=info), clean)
    assert np.isfinite(np.asarray(outputs[0])).all()
    assert_same((outputs[0], gradients), (wanted[0][0], wanted[1]))


def test_inside_a_shard_map_of_ones_own():
    """Gradients of replicated sinks are summed over the ring; a shard's mask holds its own tokens."""
    mesh, info = mesh_of(4), segments(2)
    given = problem(sinks=(4,), bias=(2, 4, T, T))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(SP, SP, SP, P(), P(None, None, "sp"), SP), out_specs=BOTH)
    def shards(query, key, value, sinks, bias, own):
        run = ring(4, causal=True, mask_info=MaskInfo.from_segments(own), mesh=None, in_specs=None, out_specs=None)
        return run(query, key, value, sinks, bias)

    got = pulled(lambda *arrays: shards(*arrays, jnp.asarray(info)), given)
    assert_same(got, pulled(local(causal=True, mask_info=MaskInfo.from_segments(info)), given))


def test_shard_map_without_checks_of_varying_axes():
    mesh = mesh_of(4)
    given = problem()
    options = {"mesh": None, "in_specs": None, "out_specs": None, "causal": True}
    run = jax.shard_map(
        lambda *arrays: ring(4, **options)(*arrays, None, None), mesh=mesh, in_specs=(SP,) * 3, out_specs=BOTH, check_vma=False
    )
    assert_same(pulled(lambda *arrays: run(*arrays[:3]), given), pulled(local(causal=True), given))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_batch_heads_and_sequence_split_at_once(kind):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), axis_types=(kind,) * 3)
    spec = P("dp", "sp", "tp")
    given = problem(sinks=(4,), bias=(2, 4, T, T))
    run = ring(2, mask_info=full_mask(), mesh=mesh, in_specs=(spec, spec, spec, None, None), out_specs=(spec, spec))
    assert_same(pulled(run, given), pulled(local(mask_info=full_mask()), given))


def test_a_ring_over_two_mesh_axes():
    mesh_of(8)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = P(None, ("a", "b"))
    query, key, value, *_ = problem()
    out = ejkernel.ring_attention(
        query, key, value, causal=True, axis_name=("a", "b"), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    assert_same(out, local(causal=True)(query, key, value, None, None)[0])


def test_a_mesh_of_one_device_and_no_axis_are_local_attention():
    names = ("dp", "fsdp", "ep", "tp", "sp")
    mesh = jax.make_mesh((1,) * 5, names, axis_types=(AxisType.Auto,) * 5, devices=jax.devices()[:1])
    spec = P(("dp", "fsdp"), "sp", "tp", None)
    query, key, value, *_ = problem()
    sinks = normal((4,))
    wanted = local(causal=True)(query, key, value, sinks, None)[0]
    specs = {"mesh": mesh, "in_specs": (spec, spec, spec, P("tp"), None), "out_specs": spec}
    out = jax.jit(
        lambda q, k, v, sinks: ejkernel.ring_attention(
            q, k, v, softmax_aux=sinks, causal=True, axis_name="sp", fused_backward=True, **specs
        )
    )(query, key, value, sinks)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(ejkernel.ring_attention(query, key, value, softmax_aux=sinks, causal=True), wanted)
    np.testing.assert_array_equal(ejkernel.RingAttention()(query, key, value, softmax_aux=sinks, causal=True), wanted)


def test_a_sequence_that_the_specs_leave_whole_is_attended_to_locally():
    query, key, value, *_ = problem()
    out = ejkernel.ring_attention(
        query, key, value, causal=True, axis_name="sp", mesh=mesh_of(2), in_specs=(P("sp"),) * 3, out_specs=P("sp")
    )
    assert_same(out, local(causal=True)(query, key, value, None, None)[0])


def test_remat_and_scan():
    run = ring(4, causal=True)

    def layers(run, query, key, value):
        def layer(x, _):
            return x + jnp.pad(run(x, key, value, None, None)[0], ((0, 0),) * 3 + ((0, 2),)), None

        return jax.lax.scan(jax.checkpoint(layer), query, length=2)[0]

    given = problem()[:3]
    got, wanted = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(layers(f, *a))), (0, 1, 2)))(*given) for f in (run, local(causal=True))
    )
    assert_same(got, wanted)


@pytest.mark.parametrize("in_axes", ((0, None, 2), (None, 0, None)), ids=str)
def test_vmap(in_axes):
    query, key, value, *_ = problem()
    copies = [
        array if axis is None else jnp.stack([array, array * 0.5, -array], axis)
        for array, axis in zip((query, key, value), in_axes, strict=True)
    ]

    def gradients(run):
        def loss(query, key, value):
            return jnp.sum(jnp.sin(run(query, key, value, None, None)[0]))

        return jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes))(*copies)

    info = MaskInfo.from_segments(segments(2))
    options = {"causal": True, "mask_info": info}
    assert_same(gradients(ring(4, **options)), gradients(local(**options)))


def test_plain_jax_derivatives():
    """`custom_gradients=False` differentiates forward-mode through the ring."""
    given = problem(sinks=(4,))[:4]
    tangents = [normal(array.shape, 11) for array in given]
    with ejkernel.use(custom_gradients=False):
        got, wanted = (
            jax.jit(lambda *a, f=f: jax.jvp(lambda *b: f(*b, None), a[:4], a[4:]))(*given, *tangents)
            for f in (ring(4, causal=True), local(causal=True))
        )
    assert_same(got, wanted)


def compiled(run, given) -> str:
    return jax.jit(jax.grad(lambda *a: jnp.sum(run(*a, None, None)[0]), (0, 1, 2))).lower(*given[:3]).compile().as_text()


def test_nothing_is_gathered_and_keys_go_round():
    mesh = mesh_of(4)
    given = [jax.device_put(array, jax.NamedSharding(mesh, SP)) for array in problem()[:3]]
    text = compiled(ring(4, causal=True), given)
    assert not re.findall(r"all-gather|all-to-all", text)
    assert len(re.findall(r" = .* collective-permute(?:-start)?\(", text)) >= 4


def test_memory_does_not_grow_with_the_ring():
    """With the shard's length fixed, a device of a ring of 8 needs no more memory than one of a ring of 2."""

    def bytes_per_device(devices: int) -> int:
        mesh = mesh_of(devices)
        shape = jax.ShapeDtypeStruct((1, 256 * devices, 2, 16), jnp.float32, sharding=jax.NamedSharding(mesh, SP))
        run = jax.jit(jax.grad(lambda q, k, v: jnp.sum(ring(devices, causal=True)(q, k, v, None, None)[0]), (0, 1, 2)))
        return run.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    assert bytes_per_device(8) <= 1.1 * bytes_per_device(2)


@pytest.fixture
def acme():
    """A platform of somebody else's: XLA's attention, opaque, that writes down its calls."""
    calls: dict[str, list] = {"forward": [], "backward": []}
    for candidate in kernel_registry.list_implementations():
        known = candidate.implementation
        if (candidate.platform, known.operation) != ("xla", "flash_attention"):
            continue

        def implementation(call, *arrays, known=known):
            calls[known.phase].append(call)
            return resolve(known.target)(call, *arrays)

        kernel_registry.register(
            "flash_attention", "acme", priority=-1, phase=known.phase, configs=known.configs, partitioning="opaque"
        )(implementation)
    yield calls
    for phase in calls:
        kernel_registry.unregister("flash_attention", "acme", phase=phase)


def test_the_inner_step_is_whatever_platform_is_asked_for(acme):
    given = problem(sinks=(4,), bias=(1, 4, T, T))
    got = pulled(ring(4, causal=True, platform="acme"), given)
    assert_same(got, pulled(local(causal=True), given))
    for calls in acme.values():
        # The diagonal block keeps its causal mask; those that came from before it need none, and no call sees the sinks.
        assert {(call.causal, call.softmax_aux, call.key.shape[1]) for call in calls} == {(True, None, 8), (False, None, 8)}
    assert all(call.save_residuals for call in acme["backward"])


def test_configs_reach_the_inner_step_and_change_no_result():
    given = problem()
    got = pulled(ring(2, causal=True, cfg={"block_q": 4, "block_k": 8, "block_q_backward": 5, "block_k_backward": 3}), given)
    assert_same(got, pulled(ring(2, causal=True), given))


def test_explain_shows_the_inner_step():
    found = ejkernel.explain("ring_attention", *problem()[:3], causal=True, axis_name="sp")
    assert found.chosen == "xla" and found.forward.operation == "flash_attention"


REFUSED = {
    "an axis that is not bound": ({}, ValueError, r"axis_name: got \('sp',\), expected a mesh axis of a surrounding shard_map"),
    "an axis of another mesh": (
        {"axis_name": "tp", "mesh": True},
        ValueError,
        "axis_name: got 'tp', expected an axis of the mesh: sp",
    ),
    "a number as axis": ({"axis_name": 3}, TypeError, "axis_name: got 3, expected the name of a mesh axis"),
    "an order": ({"layout": "striped"}, ValueError, "layout: got 'striped', expected one of contiguous, zigzag"),
    "a hint": ({"fused_backward": 1}, TypeError, "fused_backward: got 1"),
    "whole keys": (
        {"mesh": True, "in_specs": (SP, P(), P())},
        ValueError,
        r"in_specs: got the key's length split over nothing, expected split over \('sp',\)",
    ),
    "half of a bias": (
        {"mesh": True, "bias": (1, 1, T, T), "in_specs": (SP, SP, SP, None, P(None, None, None, "sp"))},
        ValueError,
        r"bias: got shape \(1, 1, 32, 16\), expected .*\(B, H, T, S\) = \(2, 4, 16, 32\)",
    ),
    "dropout": ({"dropout_prob": 0.1}, TypeError, "dropout_prob"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, error, message = REFUSED[name]
    options = {"axis_name": "sp", **options}
    if options.get("mesh"):
        options = {"in_specs": (SP,) * 3, "out_specs": SP, **options, "mesh": mesh_of(2)}
    bias = normal(options["bias"]) if "bias" in options else None
    with pytest.raises(error, match=message):
        ejkernel.ring_attention(*problem()[:3], **{**options, "bias": bias})


def test_an_odd_zigzag_is_refused():
    with pytest.raises(ValueError, match=r"array: got length 30 on axis 1, expected a multiple of 2 axis_size = 8; pad it"):
        ejkernel.zigzag_shard(jnp.zeros((1, 30)), 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": 3}, r"axis: got 3, expected a value in \[-2, 1\]"),
        ({"axis": "sp"}, "axis: got 'sp', expected an int"),
        ({"axis_size": 0}, "axis_size: got 0, expected a value >= 1"),
        ({"axis_size": 1.5}, "axis_size: got 1.5, expected an int"),
        ({"array": [[1, 2]]}, "array: got list, expected an array"),
    ],
)
@pytest.mark.parametrize("function", [ejkernel.zigzag_shard, ejkernel.zigzag_unshard])
def test_what_zigzag_refuses(function, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        function(**{"array": jnp.zeros((1, 8)), "axis_size": 2, **change})


def test_zigzag_order():
    there = ejkernel.zigzag_shard(jnp.arange(12)[None], 3)
    assert there[0].tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert ejkernel.zigzag_unshard(there, 3)[0].tolist() == list(range(12))


def test_flash_attention_names_ring_attention_where_a_sequence_is_split():
    with pytest.raises(ValueError, match=r"query's length split over .*sp.*ring_attention with axis_name="):
        ejkernel.flash_attention(*problem()[:3], mesh=mesh_of(2), in_specs=(SP,) * 3, out_specs=SP)
