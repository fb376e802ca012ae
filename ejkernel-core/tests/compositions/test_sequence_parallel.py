"""`sequence_parallel` on several devices equals the same function on one: outputs, states and every gradient."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ejkernel

T, BATCH, HEADS, KEYS, WIDTH, VALUES = 32, 2, 4, 2, 8, 6
BY_TOKEN = P(None, "sp")


def normal(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def decays(*shape: int, seed: int = 1) -> jax.Array:
    return -0.2 * jax.nn.softplus(normal(*shape, seed=seed))


def tokens(*shape: int, seed: int = 0, batch: int = BATCH, length: int = T) -> jax.Array:
    return normal(batch, length, *shape, seed=seed)


def state(*shape: int, count: int = BATCH) -> jax.Array:
    return normal(count, *shape, seed=9)


def unit(array: jax.Array) -> jax.Array:
    return array / jnp.linalg.norm(array, axis=-1, keepdims=True)


def attention(batch: int = BATCH, heads: int = HEADS) -> dict:
    shapes = {"query": (heads, WIDTH), "key": (KEYS, WIDTH), "value": (KEYS, VALUES)}
    return {name: tokens(*shape, seed=seed, batch=batch) for seed, (name, shape) in enumerate(shapes.items())}


def delta(batch: int = BATCH) -> dict:
    return {**attention(batch), "beta": jax.nn.sigmoid(tokens(KEYS, seed=4, batch=batch))}


def rwkv(removal: bool) -> dict:
    given = {name: tokens(HEADS, WIDTH, seed=seed) for seed, name in enumerate("rk")}
    given |= {"v": tokens(HEADS, VALUES, seed=3), "w": decays(BATCH, T, HEADS, WIDTH)}
    kk = unit(tokens(HEADS, WIDTH, seed=5))
    rates = jax.nn.sigmoid(tokens(HEADS, WIDTH, seed=6))
    return given | ({"kk": kk, "a": rates} if removal else {"a": -kk * rates, "b": kk})


def mamba1(batch: int = BATCH) -> dict:
    given = {"hidden_states": tokens(WIDTH, seed=1, batch=batch), "A": -jnp.exp(normal(WIDTH, 3))}
    given |= {name: tokens(3, seed=seed, batch=batch) for seed, name in enumerate("BC", 2)}
    return given | {"D": normal(WIDTH), "dt": jax.nn.softplus(tokens(WIDTH, seed=5, batch=batch) - 2)}


def mamba2(batch: int = BATCH) -> dict:
    given = {"x": tokens(HEADS, VALUES, batch=batch), "A": -jnp.exp(normal(HEADS))}
    given |= {name: tokens(KEYS, WIDTH, seed=seed, batch=batch) for seed, name in enumerate("BC", 2)}
    given |= {"D": normal(HEADS), "dt": tokens(HEADS, seed=5, batch=batch) - 2, "dt_bias": normal(HEADS, seed=6)}
    return given | {"gate": tokens(HEADS * VALUES, seed=7, batch=batch)}


def product() -> dict:
    given = {"query": tokens(HEADS, WIDTH), "key": tokens(KEYS, WIDTH, seed=1, length=2 * T)}
    given |= {"value": tokens(KEYS, VALUES, seed=2, length=2 * T)}
    return given | {"beta": jax.nn.sigmoid(tokens(KEYS, seed=3, length=2 * T)), "decay": decays(BATCH, T, KEYS)}


SEGMENTS = np.stack([np.repeat([3, 3, 5, -1, 7, 7, 1, -1], 4), np.repeat([-1, -1, 2, -1, 2, 2, 4, 4], 4)])
"""Segments that begin and end at borders of shards, within shards, and go on after padding."""
SEGMENTS[0, 5:7], SEGMENTS[0, 30:] = -1, 1
BOUNDS = np.array([0, 0, 3, 19, 19, 22, 29, 31], np.int32)
"""Sequences that are empty, lie within a shard, or span several; one ends where the next begins; one token is of none."""
COUNT = len(BOUNDS) - 1

MATRIX = functools.partial(state, HEADS, WIDTH, VALUES)
GATED = {"decay": decays(BATCH, T, KEYS)}
PER_CHANNEL = {"decay": decays(BATCH, T, KEYS, WIDTH)}
CASES = {
    "delta rule": ("gated_delta_rule", delta() | GATED, {}),
    "delta rule, state": ("gated_delta_rule", delta() | GATED | {"initial_state": MATRIX()}, {}),
    "delta rule, reverse": ("gated_delta_rule", delta() | GATED | {"initial_state": MATRIX()}, {"reverse": True}),
    "delta rule, segments": ("gated_delta_rule", delta() | {"initial_state": MATRIX(), "seg_ids": SEGMENTS}, {}),
    "delta rule, segments, reverse": (
        "gated_delta_rule",
        delta() | {"initial_state": MATRIX(), "seg_ids": SEGMENTS},
        {"reverse": True, "use_qk_l2norm": True},
    ),
    "delta rule, one segment row": ("gated_delta_rule", delta() | {"seg_ids": SEGMENTS[:1]}, {}),
    "delta rule, packed": ("gated_delta_rule", delta(1) | {"initial_state": MATRIX(count=COUNT), "cu_seqlens": BOUNDS}, {}),
    "delta rule, packed, reverse": (
        "gated_delta_rule",
        delta(1) | {"initial_state": MATRIX(count=COUNT), "cu_seqlens": BOUNDS},
        {"reverse": True},
    ),
    "kda": ("kernel_delta_attention", delta() | PER_CHANNEL | {"initial_state": MATRIX()}, {"softmax_scale": 0.7}),
    "delta product": ("gated_delta_product", product() | {"initial_state": MATRIX()}, {"num_householder": 2}),
    "delta product, segments": ("gated_delta_product", product() | {"seg_ids": SEGMENTS}, {"num_householder": 2}),
    "rwkv7": ("rwkv7", rwkv(False) | {"initial_state": MATRIX()}, {}),
    "rwkv7, removal": ("rwkv7_mul", rwkv(True), {"reverse": True}),
    "rwkv7, packed, reverse": (
        "rwkv7",
        {name: array[:1] for name, array in rwkv(False).items()} | {"initial_state": MATRIX(count=COUNT), "cu_seqlens": BOUNDS},
        {"reverse": True},
    ),
    "no decay": ("recurrent_attention", attention(), {}),
    "all decays": (
        "recurrent_attention",
        attention()
        | {"g": decays(BATCH, T, HEADS), "gk": decays(BATCH, T, KEYS, WIDTH), "gv": decays(BATCH, T, KEYS, VALUES)}
        | {"g_gamma": decays(HEADS), "initial_state": MATRIX()},
        {},
    ),
    "all decays, reverse": (
        "recurrent_attention",
        attention() | {"g": decays(BATCH, T, HEADS), "gv": decays(BATCH, T, KEYS, VALUES), "initial_state": MATRIX()},
        {"reverse": True},
    ),
    "packed": (
        "recurrent_attention",
        attention(1) | {"gk": decays(1, T, KEYS, WIDTH), "initial_state": MATRIX(count=COUNT), "cu_seqlens": BOUNDS},
        {},
    ),
    "packed, reverse": (
        "recurrent_attention",
        attention(1) | {"g": decays(1, T, HEADS), "cu_seqlens": BOUNDS},
        {"reverse": True},
    ),
    "packed, no decay": (
        "recurrent_attention",
        attention(1) | {"initial_state": MATRIX(count=COUNT), "cu_seqlens": BOUNDS},
        {},
    ),
    "packed, all decays, reverse": (
        "recurrent_attention",
        attention(1)
        | {"g": decays(1, T, HEADS), "gk": decays(1, T, KEYS, WIDTH), "gv": decays(1, T, KEYS, VALUES)}
        | {"g_gamma": decays(HEADS), "initial_state": MATRIX(count=COUNT), "cu_seqlens": BOUNDS},
        {"reverse": True},
    ),
    "gla": ("gla_attention", attention() | {"g": decays(BATCH, T, KEYS, WIDTH), "initial_state": MATRIX()}, {}),
    "gla that forgets": (
        "gla_attention",
        attention() | {"g": decays(BATCH, T, KEYS, WIDTH).at[:, 9].set(-jnp.inf).at[1, 20].set(-jnp.inf)},
        {},
    ),
    "lightning": ("lightning_attention", attention(), {"layer_idx": 1, "num_layers": 4}),
    "retention": ("retention", attention() | {"initial_state": MATRIX()}, {}),
    "rwkv6": (
        "rwkv6",
        {**{x: rwkv(False)[x] for x in "rkvw"}, "u": normal(HEADS, WIDTH), "initial_state": MATRIX()},
        {},
    ),
    "rwkv6, reverse": ("rwkv6", {**{x: rwkv(False)[x] for x in "rkvw"}, "u": normal(HEADS, WIDTH)}, {"reverse": True}),
    "mamba1": ("state_space_v1", mamba1() | {"initial_state": state(WIDTH, 3)}, {}),
    "mamba1, segments": ("state_space_v1", mamba1() | {"initial_state": state(WIDTH, 3), "seg_ids": SEGMENTS}, {}),
    "mamba1, packed": ("state_space_v1", mamba1(1) | {"initial_state": state(WIDTH, 3, count=COUNT), "cu_seqlens": BOUNDS}, {}),
    "mamba2": (
        "state_space_v2",
        mamba2() | {"initial_state": state(HEADS, VALUES, WIDTH)},
        {"dt_softplus": True, "use_gated_rmsnorm": True, "norm_before_gate": False},
    ),
    "mamba2, segments": (
        "state_space_v2",
        mamba2() | {"initial_state": state(HEADS, VALUES, WIDTH), "seg_ids": SEGMENTS},
        {"dt_softplus": True},
    ),
    "mamba2, packed": ("state_space_v2", mamba2(1) | {"cu_seqlens": BOUNDS}, {"dt_softplus": True}),
    "convolution": (
        "causal_conv1d",
        {"x": tokens(5), "weight": normal(5, 4), "bias": normal(5), "initial_state": state(3, 5)},
        {"activation": "silu"},
    ),
    "convolution, segments": (
        "causal_conv1d",
        {"x": tokens(5), "weight": normal(5, 4), "initial_state": state(3, 5), "seg_ids": SEGMENTS},
        {},
    ),
    "convolution, packed": (
        "causal_conv1d",
        {"x": tokens(5, batch=1), "weight": normal(5, 4), "initial_state": state(3, 5, count=COUNT), "cu_seqlens": BOUNDS},
        {},
    ),
}
STATES = ("state_space_v1", "state_space_v2")


def mesh_of(*sizes: int, names: tuple[str, ...] = ("sp",), kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = int(np.prod(sizes))
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices, this machine has {len(jax.devices())}")
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[:devices])


def spec_of(name: str, array, axis: str | tuple[str, ...] = "sp", batch: str | None = None) -> P:
    if name in ("initial_state", "cu_seqlens", "A", "D", "dt_bias", "g_gamma", "u", "weight", "bias"):
        return P(batch) if name == "initial_state" else P()
    return P(batch if array.shape[0] != 1 else None, axis)


def whole(name: str, options: dict):
    """The function on one device as `(output, state)` of a dictionary of arrays."""
    returning = {} if name in STATES else {"return_state": True}
    return lambda given: getattr(ejkernel, name)(**given, **options, **returning, platform="xla")[:2]


def split(name: str, options: dict, given: dict, mesh, axis: str | tuple[str, ...] = "sp", batch: str | None = None):
    returning = {} if name in STATES else {"return_state": True}
    function = ejkernel.sequence_parallel(getattr(ejkernel, name), axis)

    def local(given):
        return function(**given, **options, **returning, platform="xla")[:2]

    specs = {key: spec_of(key, array, axis, batch) for key, array in given.items()}
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(P(batch, axis), P(batch)))


def pulled(run, given: dict):
    """Output, state and gradients of every array."""
    fixed = {name: array for name, array in given.items() if name in ("seg_ids", "cu_seqlens")}

    def loss(arrays):
        found = run({**arrays, **fixed})
        return sum(jnp.sum(x * normal(*x.shape, seed=7 + i)) for i, x in enumerate(found)), found

    arrays = {name: array for name, array in given.items() if name not in fixed}
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


def assert_same(got, wanted, tolerance: float = 3e-5):
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = max(1, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", CASES)
def test_four_devices(name):
    function, given, options = CASES[name]
    assert_same(pulled(split(function, options, given, mesh_of(4)), given), pulled(whole(function, options), given))


@pytest.mark.parametrize("devices", (1, 2, 8))
@pytest.mark.parametrize("name", ("delta rule, segments", "packed", "mamba2", "convolution, segments"))
def test_other_numbers_of_devices(name, devices):
    function, given, options = CASES[name]
    assert_same(pulled(split(function, options, given, mesh_of(devices)), given), pulled(whole(function, options), given))


@pytest.mark.parametrize("name", ("delta rule, packed, reverse", "packed, no decay", "gla", "mamba1, packed"))
def test_two_devices_that_need_no_transitions(name):
    function, given, options = CASES[name]
    assert_same(pulled(split(function, options, given, mesh_of(2)), given), pulled(whole(function, options), given))


@pytest.mark.parametrize("part", (0, 1), ids=("output", "state"))
@pytest.mark.parametrize("name", ("delta rule, packed", "packed, all decays, reverse", "mamba1, segments", "mamba2"))
def test_gradients_of_the_output_and_of_the_state(name, part):
    """Each by itself: the other has no cotangent."""
    function, given, options = CASES[name]

    def alone(run):
        return lambda given: run(given)[part : part + 1]

    split_, whole_ = split(function, options, given, mesh_of(4)), whole(function, options)
    assert_same(pulled(alone(split_), given), pulled(alone(whole_), given))


@pytest.mark.parametrize("devices", (2, 4))
def test_layers_that_are_run_again(devices):
    """Under `jax.checkpoint` in `jax.lax.scan`, for each of several members by `jax.vmap`."""
    function, given, options = CASES["gla"]
    members = {name: jnp.stack([array, array[:, ::-1] if array.shape[1] == T else -array]) for name, array in given.items()}

    def loss(run):
        def one(given):
            def layer(value, _):
                return run({**given, "value": value})[0][:, :, :KEYS], None

            value, _ = jax.lax.scan(jax.checkpoint(layer), given["value"], length=2)
            return jnp.sum(jnp.sin(value))

        return jax.jit(jax.grad(lambda members: jnp.sum(jax.vmap(one)(members))))(members)

    assert_same(loss(split(function, options, given, mesh_of(devices))), loss(whole(function, options)))


def test_a_state_in_bfloat16():
    function, given, options = CASES["delta rule, state"]
    given = given | {"initial_state": given["initial_state"].astype(jnp.bfloat16)}
    found, wanted = pulled(split(function, options, given, mesh_of(2)), given), pulled(whole(function, options), given)
    assert found[1]["initial_state"].dtype == jnp.bfloat16
    assert_same(found, wanted, 1e-2)


def test_a_gradient_is_not_differentiated_again():
    function, given, options = CASES["gla"]
    run = split(function, options, given, mesh_of(2))
    first = jax.grad(lambda arrays: jnp.sum(jnp.sin(run(arrays)[0])))
    with pytest.raises(TypeError, match="linear_recurrence: its gradient was differentiated again"):
        jax.grad(lambda arrays: jnp.sum(first(arrays)["key"]))(given)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("name", ("delta rule, state", "gla", "convolution"))
def test_batch_and_sequence_over_a_mesh(name, kind):
    """The sequence over two axes, the batch over a third."""
    function, given, options = CASES[name]
    mesh = mesh_of(2, 2, 2, names=("dp", "outer", "inner"), kind=kind)
    axis = ("outer", "inner")
    run = split(function, options, given, mesh, axis, "dp")
    placed = {x: jax.device_put(y, NamedSharding(mesh, spec_of(x, y, axis, "dp"))) for x, y in given.items()}

    def loss(arrays):
        return sum(jnp.sum(jnp.sin(x)) for x in run(arrays))

    found = jax.jit(jax.grad(loss))(placed)
    wanted = jax.grad(lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in whole(function, options)(arrays)))(given)
    assert_same(found, wanted)


def test_no_tokens():
    given = {name: array[:, :0] for name, array in attention().items()}
    with pytest.raises(ValueError, match="query: got no tokens on a device, expected at least one"):
        split("gla_attention", {}, given, mesh_of(4))(given)


def test_decoding_goes_on_from_the_state():
    function, given, options = CASES["delta rule"]
    run, single = split(function, options, given, mesh_of(4)), whole(function, options)
    carried = {**given, "initial_state": run(given)[1]}
    assert_same(single(carried), single({**given, "initial_state": single(given)[1]}))


def test_bfloat16():
    function, given, options = CASES["gla"]
    given = {name: x if name in ("g", "initial_state") else x.astype(jnp.bfloat16) for name, x in given.items()}
    found, wanted = split(function, options, given, mesh_of(4))(given), whole(function, options)(given)
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    assert_same(found, wanted, 2e-2)


def test_without_custom_gradients():
    """Plain JAX code, differentiated twice."""
    function, given, options = CASES["delta rule, state"]

    def second(run):
        first = jax.grad(lambda arrays: jnp.sum(jnp.sin(run(arrays)[0])))
        return jax.grad(lambda arrays: jnp.sum(jnp.sin(first(arrays)["key"])))(given)["beta"]

    with ejkernel.use("xla", custom_gradients=False):
        assert_same(
            jax.jit(lambda: second(split(function, options, given, mesh_of(2))))(), second(whole(function, options)), 1e-4
        )


COLLECTIVES = r" = (.*) (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
BYTES = {"f32": 4, "pred": 1, "s32": 4}


def exchanged(function: str, given: dict, options: dict, gradients: bool) -> dict[str, int]:
    """Bytes of the results of all collectives of the compiled program, by their kind."""
    mesh = mesh_of(4)
    call = ejkernel.sequence_parallel(getattr(ejkernel, function), "sp")
    specs = {key: spec_of(key, array) for key, array in given.items()}

    def local(arrays):
        return call(**arrays, **options, platform="xla")

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=BY_TOKEN)
    placed = {x: jax.device_put(y, NamedSharding(mesh, specs[x])) for x, y in given.items()}
    traced = jax.jit(jax.grad(lambda arrays: jnp.sum(jnp.sin(run(arrays))))) if gradients else jax.jit(run)
    found: dict[str, int] = {}
    for shapes, kind in re.findall(COLLECTIVES, traced.lower(placed).compile().as_text()):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            found[kind] = found.get(kind, 0) + BYTES[dtype] * int(np.prod([int(x) for x in dims.split(",") if x]))
    return found


def longer(given: dict, times: int) -> dict:
    return {
        name: jnp.concatenate([array] * times, axis=1) if array.shape[1:2] == (T,) else array for name, array in given.items()
    }


STATE = BATCH * HEADS * WIDTH * VALUES * 4
SENT = {
    "delta rule": {"all-gather": 4 * (STATE + BATCH * HEADS * WIDTH * WIDTH * 4)},
    "no decay": {"all-gather": 4 * STATE},
    "gla": {"all-gather": 4 * (STATE + BATCH * HEADS * WIDTH * 4)},
    "convolution": {"collective-permute": BATCH * 3 * 5 * 4},
}


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_does_not_grow_with_the_sequence(name):
    function, given, options = CASES[name]
    assert exchanged(function, given, options, False) == exchanged(function, longer(given, 4), options, False) == SENT[name]
    assert exchanged(function, given, options, True) == exchanged(function, longer(given, 4), options, True)


REFUSED = {
    "another function": (ValueError, "function: got flash_attention, expected one of causal_conv1d, ", "flash_attention", {}),
    "mesh": (ValueError, "mesh: got a value, expected None inside a shard_map", "gla_attention", {"mesh": "mesh"}),
    "bounds": (
        ValueError,
        "cu_seqlens: got .*at most 32 = length of query on 4 devices",
        "gla_attention",
        {"cu_seqlens": [0, 33]},
    ),
    "both": (ValueError, "seg_ids: got an array, expected None beside cu_seqlens", "gated_delta_rule", {"cu_seqlens": [0, 32]}),
    "no array": (TypeError, "query", "gla_attention", {"query": "q"}),
    "unknown keyword": (
        TypeError,
        "gla_attention has no argument 'scale'; it is called softmax_scale",
        "gla_attention",
        {"scale": 3},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_calls(name):
    error, message, function, changed = REFUSED[name]
    changed = {key: np.array(value, np.int32) if key == "cu_seqlens" else value for key, value in changed.items()}
    given = delta(1) if function == "gated_delta_rule" else attention(1)
    if name == "both":
        changed["seg_ids"] = np.zeros((1, T // 4), np.int32)

    def run(given):
        return ejkernel.sequence_parallel(getattr(ejkernel, function), "sp")(**{**given, **changed})

    with pytest.raises(error, match=message):
        jax.shard_map(run, mesh=mesh_of(4), in_specs=BY_TOKEN, out_specs=BY_TOKEN)(given)


def test_too_few_tokens_for_the_filter():
    run = jax.shard_map(
        ejkernel.sequence_parallel(ejkernel.causal_conv1d, "sp"), mesh=mesh_of(4), in_specs=(BY_TOKEN, P()), out_specs=BY_TOKEN
    )
    with pytest.raises(ValueError, match="x: got 2 tokens on a device, expected at least 3, what the filter looks back"):
        run(normal(1, 8, 5), normal(5, 4))


def test_bad_axes():
    with pytest.raises(ValueError, match="axis_name: got None, expected a mesh axis"):
        ejkernel.sequence_parallel(ejkernel.gla_attention, None)
    with pytest.raises(ValueError, match=r"axis_name: got .*sp.*, expected a mesh axis of a surrounding shard_map"):
        ejkernel.sequence_parallel(ejkernel.gla_attention, "sp")(**attention())


def test_the_function_keeps_its_name_and_its_arguments():
    function = ejkernel.sequence_parallel(ejkernel.gla_attention, axis_name="sp")
    assert function.__name__ == "gla_attention" and function.__wrapped__ is ejkernel.gla_attention
