"""Linear attention's public functions on XLA: decays, scales, names, returned values, meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.utils.tolerance import Tolerance, check_close

CLOSE = Tolerance(1e-5, 1e-4)
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 2, 6, 4, 3)).astype(np.float32)
V = RNG.standard_normal((2, 6, 4, 2)).astype(np.float32)
W = -np.abs(RNG.standard_normal((2, 6, 4, 3))).astype(np.float32)
U = RNG.standard_normal((4, 3)).astype(np.float32)
S0 = RNG.standard_normal((2, 4, 3, 2)).astype(np.float32)


def by_hand(q: Any, k: Any, v: Any, decay: Any, scale: float, state: Any = None, u: Any = None) -> tuple[Any, Any]:
    """One token after the other; `decay [B,T,H,D]` multiplies the state."""
    state = np.zeros((*q.shape[:1], *q.shape[2:], v.shape[-1])) if state is None else state.astype(np.float64)
    outs = []
    for t in range(q.shape[1]):
        outer = k[:, t, :, :, None] * v[:, t, :, None, :]
        after = decay[:, t, :, :, None] * state + outer
        seen = after if u is None else state + u[None, :, :, None] * outer
        outs.append(scale * np.einsum("bhd,bhdv->bhv", q[:, t], seen))
        state = after
    return np.stack(outs, axis=1), state


def check(got: Any, wanted: tuple[Any, Any]) -> None:
    out, state = got
    check_close("out", out, wanted[0], CLOSE)
    check_close("state", state, wanted[1], CLOSE)
    assert state.dtype == jnp.float32


def per_head(gamma: Any) -> Any:
    return np.broadcast_to(np.exp(np.asarray(gamma))[:, None], W.shape)


def test_lightning_decays_count_heads_from_0() -> None:
    gamma = [-(8 / 4) * (1 - 3 / 12) * h for h in range(4)]
    wanted = by_hand(Q, K, V, per_head(gamma), 3**-0.5)
    check(ejkernel.lightning_attention(Q, K, V, layer_idx=3, num_layers=12, return_state=True), wanted)
    check(ejkernel.lightning_attn(Q, K, V, 3, 12), wanted)


def test_retention_decays() -> None:
    gamma = np.log([1 - 2.0 ** (-5 - h) for h in range(4)])
    check(ejkernel.retention(Q, K, V, initial_state=S0, return_state=True), by_hand(Q, K, V, per_head(gamma), 3**-0.5, S0))


def test_gla_gates_by_channel_or_by_head() -> None:
    wanted = by_hand(Q, K, V, np.exp(W), 3**-0.5, S0)
    check(ejkernel.gla_attention(Q, K, V, g=W, initial_state=S0, return_state=True), wanted)
    check(ejkernel.gla(Q, K, V, g=W, initial_state=S0), wanted)
    wanted = by_hand(Q, K, V, np.broadcast_to(np.exp(W[..., :1]), W.shape), 2.0)
    check(ejkernel.gla_attention(Q, K, V, g=W[..., 0], softmax_scale=2.0, return_state=True), wanted)


def test_recurrent_under_both_names() -> None:
    gamma = W[0, 0, :, 0]
    wanted = by_hand(Q, K, V, np.exp(W) * per_head(gamma), 3**-0.5, S0)
    check(ejkernel.recurrent_attention(Q, K, V, g_gamma=gamma, gk=W, initial_state=S0, return_state=True), wanted)
    check(ejkernel.recurrent(Q, K, V, gk=W, initial_state=S0, g_gamma=gamma), wanted)
    check(ejkernel.recurrent(Q, K, V, gk=W, initial_state=S0, g_gamma=np.tile(gamma, (2, 1))), wanted)
    alone = ejkernel.recurrent_attention(Q, K, V, g_gamma=gamma, gk=W, initial_state=S0)
    check_close("out", alone, wanted[0], CLOSE)


def test_rwkv6_reads_before_it_writes() -> None:
    wanted = by_hand(Q, K, V, np.exp(W), 3**-0.5, S0, U)
    check(ejkernel.rwkv6(Q, K, V, W, U, initial_state=S0, return_state=True), wanted)
    assert ejkernel.rwkv6(Q, K, V, W, U).shape == (2, 6, 4, 2)


def test_packed_states_are_per_sequence() -> None:
    out, state = ejkernel.rwkv6(
        Q[:1], K[:1], V[:1], W[:1], U, initial_state=S0, cu_seqlens=np.array([0, 4, 6]), softmax_scale=1.0, return_state=True
    )
    for i, tokens in enumerate((slice(0, 4), slice(4, 6))):
        wanted = by_hand(*(x[:1, tokens] for x in (Q, K, V, np.exp(W))), 1.0, S0[i : i + 1], U)
        check((out[:, tokens], state[i : i + 1]), wanted)


def test_class_forms() -> None:
    executor = ejkernel.create_default_executor()
    for form, arrays, options in (
        (ejkernel.RecurrentAttention, (Q, K, V), {}),
        (ejkernel.GLAttention, (Q, K, V), {"g": W}),
        (ejkernel.GatedLinearAttention, (Q, K, V), {"g": W}),
        (ejkernel.LightningAttention, (Q, K, V), {"layer_idx": 0, "num_layers": 2}),
        (ejkernel.Retention, (Q, K, V), {}),
        (ejkernel.RWKV6, (Q, K, V, W, U), {}),
    ):
        np.testing.assert_array_equal(executor(form(), *arrays, **options), form.function(*arrays, **options))


@pytest.mark.parametrize("name", ["gla_attention", "lightning_attention", "retention"])
def test_over_a_mesh(name: str) -> None:
    """Batch and heads split over 2 x 2 devices; decays that follow from the head's number are those of the whole array."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec, state_spec = P("data", None, "model"), P("data", "model")
    arrays = {"initial_state": S0, **({"g": W} if name == "gla_attention" else {})}
    in_specs = (spec, spec, spec, spec, None, state_spec) if name == "gla_attention" else (spec, spec, spec, state_spec)
    options = {"return_state": True, **({"layer_idx": 1, "num_layers": 4} if name == "lightning_attention" else {})}
    function = getattr(ejkernel, name)
    got = function(Q, K, V, **arrays, **options, mesh=mesh, in_specs=in_specs, out_specs=(spec, state_spec))
    for one, other in zip(got, function(Q, K, V, **arrays, **options), strict=True):
        check_close(name, one, other, Tolerance(2e-6, 2e-5))


def two_by_two() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 1, 2), ("data", "sp", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.mark.parametrize("name", ["recurrent_attention", "gated_delta_rule"])
def test_axes_of_one_device_split_nothing(name: str) -> None:
    """Clients name their sequence axis for tokens, and not for states, also where it has one device."""
    spec, state_spec = P("data", "sp", "model"), P("data", "model")
    arrays = (Q, K, V) if name == "recurrent_attention" else (Q, K, V, np.abs(W[..., 0]))
    function = getattr(ejkernel, name)
    shard = {"mesh": two_by_two(), "in_specs": (spec,) * len(arrays), "out_specs": (spec, state_spec)}
    got = function(*arrays, return_state=True, **shard)
    for one, other in zip(got, function(*arrays, return_state=True), strict=True):
        check_close(name, one, other, Tolerance(2e-6, 2e-5))


@pytest.mark.parametrize(
    ("name", "specs", "message"),
    [
        ("recurrent_attention", (P(None, "data"),) * 3, "axis t of query split over data, expected it whole"),
        ("retention", (P(), P(), P(None, None, None, "model")), "axis v of value split over model, expected it whole"),
        ("gla_attention", (P(None, None, "model"), P(), P()), "axis h of key split over nothing, expected model as in query"),
        ("recurrent_attention", (P("data"), P("data"), P("data"), P("model")), "axis b of g split over model, expected data"),
        ("gated_delta_rule", (P(None, "data"),) * 4, "axis t of query split over data, expected it whole"),
        ("gated_delta_rule", (P(None, None, "model"), P(), P(), P()), "axis h of key split over nothing, expected model"),
    ],
)
def test_splits_that_would_compute_something_else_are_refused(name: str, specs: Any, message: str) -> None:
    """Each device would begin with empty states, or pair other heads."""
    rates = np.abs(W[..., 0])
    fourth = {"gated_delta_rule": {"beta": rates}, "recurrent_attention": {"g": -rates}, "retention": {"initial_state": S0}}
    arrays = {"query": Q, "key": K[:, :, :2], "value": V[:, :, :2], **(fourth[name] if len(specs) == 4 else {})}
    with pytest.raises(ValueError, match="^in_specs: got " + message):
        getattr(ejkernel, name)(**arrays, mesh=two_by_two(), in_specs=specs, out_specs=P())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layer_idx": 4, "num_layers": 4}, ValueError, "layer_idx: got 4, expected a value from 0 to num_layers - 1 = 3"),
        ({"layer_idx": -1, "num_layers": 4}, ValueError, "layer_idx: got -1, expected a value from 0"),
        ({"layer_idx": 0.5, "num_layers": 4}, TypeError, "layer_idx: got 0.5, expected an int"),
        ({"layer_idx": 0, "num_layers": True}, TypeError, "num_layers: got True, expected an int"),
    ],
)
def test_refused_layers(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ejkernel.lightning_attention(Q, K, V, **options)


def test_wrong_rank_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"query: got shape \(6, 4, 3\) with 3 axes, expected 4 axes"):
        ejkernel.retention(Q[0], K, V)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ejkernel.recurrent_attention(Q, K, V, softmax_scale="1"), "softmax_scale: got '1', expected a number"),
        (lambda: ejkernel.gla(Q, K, V, g=W.astype(int)), "g: got dtype int.*, expected a floating type"),
        (lambda: ejkernel.rwkv6(Q, K, V, W.astype(int), U), "w: got dtype int.*, expected a floating type"),
        (lambda: ejkernel.rwkv6(Q, K, V, W, U.astype(int)), "u: got dtype int"),
        (lambda: ejkernel.rwkv6(Q, K[:, 1:], V, W, U), r"k: got shape \(2, 5, 4, 3\), expected .* as r\n"),
        (lambda: ejkernel.rwkv7(Q, W[:1], K, V, K, K), r"w: got shape .*, with batch, length and channels of r\n"),
        (lambda: ejkernel.rwkv7_mul(Q, W, K, V, K.astype(jnp.float8_e4m3fn), K), "kk: got dtype float8_e4m3fn"),
        (lambda: ejkernel.rwkv7_mul(Q, W, K, V, K, K.astype(jnp.float8_e4m3fn)), "a: got dtype float8_e4m3fn"),
        (lambda: ejkernel.gated_delta_rule(Q, K, Q, Q[..., 0], use_chunked=1), "use_chunked: got 1, expected a bool"),
        (lambda: ejkernel.gated_delta_rule(Q, K, Q, Q[..., 0], seg_ids=Q[:, :, 0, 0]), "seg_ids: got dtype float32"),
        (lambda: ejkernel.gated_delta_rule(Q, K, Q, Q[..., 0], chunk_size=np.ones(3)), r"chunk_size: got .*, expected an int"),
        (lambda: ejkernel.lightning_attention(Q, K, V, layer_idx=0, num_layers=0), "num_layers: got 0, expected a value >= 1"),
        (lambda: ejkernel.retention([[1, 2**40]], K, V), "query: got list, expected an array"),
    ],
)
def test_refusals_name_the_arguments_of_the_function_that_was_called(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + message):
        call()
    with pytest.raises(
        ValueError, match=r"^softmax_scale: got nan, expected a finite number"
    ):  # names are the operation's again
        get_operation("linear_recurrence").canonicalise(Q, K, V, softmax_scale=float("nan"))


def test_no_channel() -> None:
    out, state = ejkernel.recurrent_attention(Q[..., :0], K[..., :0], V, return_state=True)
    np.testing.assert_array_equal(out, np.zeros(V.shape))
    assert state.shape == (2, 4, 0, 2)


def test_explain() -> None:
    explanation = ejkernel.explain("lightning_attention", Q, K, V, layer_idx=0, num_layers=2)
    assert explanation.forward.chosen is not None
    assert explanation.forward.chosen.platform == "xla"
