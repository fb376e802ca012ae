"""Options that public models' layers need, against what those layers compute, written out in NumPy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.utils.tolerance import Tolerance, check_close

CLOSE = Tolerance(1e-5, 1e-4)
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def normed(x: Any, group: int) -> Any:
    groups = x.reshape(*x.shape[:-1], -1, group).astype(np.float64)
    return (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)).reshape(x.shape)


# gated_rms_norm


@pytest.mark.parametrize("group", [12, 4, 1])
def test_gated_rms_norm_in_both_orders(group: int) -> None:
    x, gate, weight = normal(2, 5, 12), normal(2, 5, 12), normal(12)
    gate_first = ejkernel.gated_rms_norm(x, gate, weight, norm_before_gate=False, group_size=group)
    norm_first = ejkernel.gated_rms_norm(x, gate, weight, norm_before_gate=True, group_size=group, act_fn=jax.nn.sigmoid)
    check_close("gate first", gate_first, normed(x * silu(gate), group) * weight, CLOSE)
    check_close("norm first", norm_first, normed(x, group) * weight / (1 + np.exp(-gate)), CLOSE)


def test_gated_rms_norm_rounds_once() -> None:
    """The product with the gate stays in float32 until the end: half the spacing of bfloat16 is all that may be lost."""
    x, gate, weight = (jnp.asarray(array, jnp.bfloat16) for array in (normal(4, 64), normal(4, 64), normal(64)))
    wide = [np.asarray(array, np.float64) for array in (x, gate, weight)]
    got = np.asarray(ejkernel.gated_rms_norm(x, gate, weight, norm_before_gate=False), np.float64)
    wanted = normed(wide[0] * silu(wide[1]), 64) * wide[2]
    assert np.all(np.abs(got - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6)


def test_gated_rms_norm_gradients() -> None:
    arrays = [jnp.asarray(array) for array in (normal(3, 8), normal(3, 8), normal(8))]
    weights = normal(3, 8)

    def loss(*arrays: Any) -> Any:
        return jnp.sum(weights * ejkernel.gated_rms_norm(*arrays, norm_before_gate=False, group_size=4))

    def by_hand(x: Any, gate: Any, weight: Any) -> float:
        return float((weights * normed(x * silu(gate), 4) * weight).sum())

    for index, gradient in enumerate(jax.grad(loss, (0, 1, 2))(*arrays)):
        direction = RNG.standard_normal(gradient.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [np.asarray(array, np.float64) for array in arrays]
            moved[index] = moved[index] + step * direction
            ends.append(by_hand(*moved))
        slope = (ends[0] - ends[1]) / 2e-5
        assert abs(slope - np.vdot(gradient, direction)) < 1e-4 * (1 + abs(slope)), index


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "norm_before_gate"),
        ({"norm_before_gate": None}, TypeError, "norm_before_gate: got None, expected True or False"),
        (
            {"norm_before_gate": False, "group_size": 5},
            ValueError,
            "group_size: got 5, expected a divisor of the 12 channels of x",
        ),
        ({"norm_before_gate": False, "group_size": 4.0}, TypeError, "group_size: got 4.0, expected an int or None"),
        ({"norm_before_gate": False, "act_fn": "silu"}, TypeError, "act_fn: got 'silu', expected a function of an array"),
        ({"norm_before_gate": False, "epsilon": -1}, ValueError, "epsilon: got -1"),
        (
            {"norm_before_gate": False, "scale": np.ones(3, np.float32)},
            ValueError,
            r"scale: got shape \(3,\), expected \(12,\)",
        ),
        ({"norm_before_gate": False, "gate": np.ones((2, 1, 12), np.float32)}, ValueError, r"gate: got shape \(2, 1, 12\)"),
    ],
)
def test_gated_rms_norm_refuses(options: Any, error: type[Exception], message: str) -> None:
    arguments = {"x": normal(2, 5, 12), "gate": normal(2, 5, 12), **options}
    with pytest.raises(error, match=message):
        ejkernel.gated_rms_norm(**arguments)


# state_space_v2 and v1


def ssd(batch: int = 1, length: int = 9) -> dict[str, Any]:
    heads, channels, width = 4, 3, 5
    return {
        "x": normal(batch, length, heads, channels),
        "A": -np.exp(normal(heads)),
        "B": normal(batch, length, 2, width),
        "C": normal(batch, length, 2, width),
        "D": normal(heads, channels),
        "dt": normal(batch, length, heads),
        "dt_bias": normal(heads),
        "dt_softplus": True,
        "gate": normal(batch, length, heads * channels),
    }


def mamba(batch: int = 1, length: int = 9) -> dict[str, Any]:
    channels, width = 6, 5
    return {
        "hidden_states": normal(batch, length, channels),
        "A": -np.exp(normal(channels, width)),
        "B": normal(batch, length, width),
        "C": normal(batch, length, width),
        "D": normal(channels),
        "dt": normal(batch, length, channels),
        "dt_bias": normal(channels),
        "dt_softplus": True,
        "gate": normal(batch, length, channels),
    }


LAYERS = {
    "state_space_v1": (mamba, (6, 5), ("hidden_states", "B", "C", "dt", "gate")),
    "state_space_v2": (ssd, (4, 3, 5), ("x", "B", "C", "dt", "gate")),
}
layers = pytest.mark.parametrize("name", LAYERS)


def some(name: str, arguments: dict[str, Any], rows: slice, tokens: slice) -> dict[str, Any]:
    return {key: value[rows, tokens] if key in LAYERS[name][2] else value for key, value in arguments.items()}


@layers
def test_step_sizes_as_the_model_projects_them(name: str) -> None:
    arguments = LAYERS[name][0](2)
    ready = {**arguments, "dt": softplus(arguments["dt"] + arguments["dt_bias"])}
    del ready["dt_bias"], ready["dt_softplus"]
    function = getattr(ejkernel, name)
    for got, wanted in zip(function(**arguments)[:2], function(**ready)[:2], strict=True):
        check_close(name, got, wanted, CLOSE)
    biased = {**arguments, "dt_softplus": False, "dt": np.abs(arguments["dt"]), "dt_bias": np.abs(arguments["dt_bias"])}
    ready["dt"] = biased["dt"] + biased["dt_bias"]
    check_close(name, function(**biased)[0], function(**ready)[0], CLOSE)


def test_a_skip_per_channel() -> None:
    arguments = ssd(2)
    without = {**arguments, "D": None, "gate": None}
    wanted = np.asarray(ejkernel.state_space_v2(**without)[0]) + (arguments["D"] * arguments["x"]).reshape(2, 9, 12)
    check_close("y", ejkernel.state_space_v2(**{**arguments, "gate": None})[0], wanted, CLOSE)
    gradient = jax.grad(lambda D: ejkernel.state_space_v2(**{**arguments, "D": D, "gate": None})[0].sum())(arguments["D"])
    check_close("gradient of D", gradient, arguments["x"].sum((0, 1)), CLOSE)


@layers
@pytest.mark.parametrize("traced", [False, True])
def test_packed_sequences_are_computed_apart(name: str, traced: bool) -> None:
    """Tokens of no sequence hold NaN, the gate too."""
    make, shape, tokens = LAYERS[name]
    arguments, states = make(), normal(3, *shape)
    for key in tokens:
        arguments[key][:, 7:] = np.nan
    bounds = jnp.array([0, 4, 4, 7], jnp.int32)

    def run(bounds: Any) -> Any:
        return getattr(ejkernel, name)(**arguments, initial_state=states, cu_seqlens=bounds)[:2]

    out, last = (jax.jit(run) if traced else run)(bounds)
    assert last.shape == states.shape and last.dtype == jnp.float32
    for index, one in enumerate((slice(0, 4), slice(4, 4), slice(4, 7))):
        alone = getattr(ejkernel, name)(**some(name, arguments, slice(None), one), initial_state=states[index : index + 1])
        check_close("y", out[:, one], alone[0], CLOSE)
        check_close("state", last[index], alone[1][0], CLOSE)
    assert not np.any(out[:, 7:])


@layers
def test_segments_are_computed_apart(name: str) -> None:
    """The first segment starts from the given state, the next from nothing; padding separates nothing and holds NaN."""
    make, shape, tokens = LAYERS[name]
    arguments, state = make(2), normal(2, *shape)
    ids = np.array([[0, 0, 0, 0, 1, 1, 1, -1, -1], [7, -1, 7, 7, -1, 5, 5, 5, 5]])
    for key in tokens:
        arguments[key][ids < 0] = np.nan
    out, last, _ = getattr(ejkernel, name)(**arguments, initial_state=state, seg_ids=ids)
    for row in range(2):
        carried = state[row : row + 1]
        for number, value in enumerate(dict.fromkeys(ids[row][ids[row] >= 0])):
            where = np.flatnonzero(ids[row] == value)
            carried = carried if number == 0 else np.zeros_like(carried)
            alone = some(name, arguments, slice(row, row + 1), where)
            y, carried, _ = getattr(ejkernel, name)(**alone, initial_state=carried)
            check_close("y", out[row, where], y[0], CLOSE)
        check_close("state", last[row], carried[0], CLOSE)
    assert not np.any(np.asarray(out)[ids < 0])


@layers
def test_gradients_of_tokens_of_no_sequence_are_0(name: str) -> None:
    make, _, tokens = LAYERS[name]
    arguments = {key: jnp.asarray(value) if hasattr(value, "shape") else value for key, value in make().items()}
    for key in tokens:
        arguments[key] = arguments[key].at[:, 7:].set(jnp.nan)
    moving = {key: value for key, value in arguments.items() if hasattr(value, "shape")}
    fixed = {key: value for key, value in arguments.items() if key not in moving}
    for packing in ({"cu_seqlens": jnp.array([0, 3, 7])}, {"seg_ids": jnp.array([[0, 0, 0, 1, 1, 1, 1, -1, -1]])}):
        gradients = jax.grad(lambda moving, fixed, packing: getattr(ejkernel, name)(**moving, **fixed, **packing)[0].sum())(
            moving, fixed, packing
        )
        for key, gradient in gradients.items():
            assert np.all(np.isfinite(gradient)), key
            assert key not in tokens or not np.any(gradient[:, 7:]), key
            assert np.any(gradient), key


@pytest.mark.parametrize("group", [None, 6])
def test_the_norm_of_mamba_2_models(group: int | None) -> None:
    arguments, weight = ssd(2), normal(12)
    bare = np.asarray(ejkernel.state_space_v2(**{**arguments, "gate": None})[0])
    settings = {"use_gated_rmsnorm": True, "norm_weight": weight, "norm_group_size": group}
    got = ejkernel.state_space_v2(**arguments, **settings, norm_before_gate=False)[0]
    check_close("gate first", got, normed(bare * silu(arguments["gate"]), group or 12) * weight, CLOSE)
    got = ejkernel.state_space_v2(**arguments, **settings, norm_before_gate=True)[0]
    check_close("norm first", got, normed(bare, group or 12) * weight * silu(arguments["gate"]), CLOSE)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"use_gated_rmsnorm": True, "norm_weight": np.ones(12, np.float32)},
            ValueError,
            "norm_before_gate: got None, expected True or False beside a weight or groups; Mamba-2's models have False",
        ),
        ({"norm_before_gate": False}, ValueError, "norm_before_gate: got a value, expected None without use_gated_rmsnorm"),
        ({"norm_group_size": 6}, ValueError, "norm_group_size: got a value, expected None without use_gated_rmsnorm"),
        (
            {"use_gated_rmsnorm": True, "norm_before_gate": False, "norm_group_size": 5},
            ValueError,
            "norm_group_size: got 5, expected a divisor of the 12 channels",
        ),
        (
            {"use_gated_rmsnorm": True, "norm_before_gate": False, "norm_weight": np.ones(3, np.float32)},
            ValueError,
            r"norm_weight: got shape \(3,\)",
        ),
        ({"dt_softplus": None}, TypeError, "dt_softplus: got None, expected True or False"),
        ({"dt_bias": np.ones(3, np.float32)}, ValueError, r"dt_bias: got shape \(3,\), expected \(4,\) = \[H\]"),
        ({"D": np.ones((3, 4), np.float32)}, ValueError, r"D: got shape \(3, 4\), expected \(4, 3\) = \[H, P\]"),
        (
            {"seg_ids": np.zeros((1, 9), np.int32), "cu_seqlens": np.array([0, 9])},
            ValueError,
            "seg_ids: got an array, expected None",
        ),
        ({"seg_ids": np.zeros((1, 8), np.int32)}, ValueError, r"seg_ids: got shape \(1, 8\)"),
        ({"seg_ids": np.zeros((1, 9), np.float32)}, TypeError, "seg_ids: got dtype float32, expected integers"),
        ({"cu_seqlens": np.array([0, 12])}, ValueError, "cu_seqlens: got .* expected values that do not decrease"),
        (
            {"cu_seqlens": np.array([0, 5, 9]), "initial_state": np.ones((1, 4, 3, 5), np.float32)},
            ValueError,
            r"initial_state: got shape \(1, 4, 3, 5\), expected \(2, 4, 3, 5\) = \[n, H, P, N\]",
        ),
    ],
)
def test_state_space_v2_refuses(changed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ejkernel.state_space_v2(**{**ssd(), **changed})


# lightning_attention


def alibi(heads: int) -> list[float]:
    """Slopes as ALiBi's paper and MiniMax's code make them, by recursion."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes if power == heads else slopes + alibi(2 * power)[::2][: heads - power]


@pytest.mark.parametrize(("kind", "layer"), [("minimax", 0), ("minimax", 79), ("bailing", 0), ("bailing", 41), ("linear", 41)])
@pytest.mark.parametrize("heads", [1, 5, 8])
def test_slopes_of_models(kind: str, layer: int, heads: int) -> None:
    q, k, v = (normal(1, 6, heads, 3) for _ in range(3))
    depth = {"minimax": layer / 79, "bailing": (layer - 1) / 79, "linear": layer / 80}[kind]
    slopes = np.array(alibi(heads)) * (1 - depth + 1e-5)
    if kind == "linear":
        slopes = 8 / heads * (1 - depth) * np.arange(heads)
    options: Any = {"layer_idx": layer, "num_layers": 80, "slopes": kind, "softmax_scale": 1.0}
    age = np.arange(6)[:, None] - np.arange(6)
    decay = np.where(age >= 0, np.exp(-slopes[:, None, None] * np.maximum(age, 0)), 0)
    wanted = np.einsum("bthd,bshd,hts,bshv->bthv", q, k, decay, v)
    check_close("out", ejkernel.lightning_attention(q, k, v, **options), wanted, CLOSE)
    assert np.array_equal(ejkernel.lightning_attn(q, k, v, **options)[0], ejkernel.lightning_attention(q, k, v, **options))


def test_slopes_of_one_layer_and_of_unknown_models() -> None:
    q = normal(1, 4, 2, 3)
    got = ejkernel.lightning_attention(q, q, q, layer_idx=0, num_layers=1, slopes="minimax")
    decays = -np.array([2.0**-4, 2.0**-8], np.float32) * (1 + 1e-5)
    check_close("out", got, ejkernel.recurrent_attention(q, q, q, g_gamma=decays), CLOSE)
    with pytest.raises(ValueError, match="slopes: got 'alibi', expected 'linear', 'minimax' or 'bailing'; recurrent"):
        ejkernel.lightning_attention(q, q, q, layer_idx=0, num_layers=2, slopes="alibi")  # pyright: ignore[reportArgumentType]


# Rotary embedding


def turned(x: Any, positions: Any, interleaved: bool) -> Any:
    """Pairs as complex numbers, turned by `position * 10000^(-2i / D)`; x `[..., T, H, D]`."""
    width = x.shape[-1]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : width // 2], x[..., width // 2 :])
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    found = (a + 1j * b) * np.exp(1j * angles)[:, None]
    return (
        np.stack([found.real, found.imag], -1).reshape(x.shape) if interleaved else np.concatenate([found.real, found.imag], -1)
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
def test_rope_of_packed_tokens(interleaved: bool, per_pair: bool) -> None:
    q, k, positions = normal(7, 4, 8), normal(7, 2, 8), np.array([0, 1, 2, 3, 0, 1, 2])
    tables = ejkernel.LlamaRotaryEmbedding(8, interleaved=interleaved and not per_pair, per_pair=per_pair)(positions)
    assert tables[0].shape == (7, 4 if per_pair else 8)
    for x in (q, k):
        check_close("rope", ejkernel.rope(x, *tables, interleaved=interleaved), turned(x, positions, interleaved), CLOSE)
    for got, x in zip(ejkernel.llama_rope(q, k, *tables, interleaved=interleaved), (q, k), strict=True):
        check_close("llama_rope", got, turned(x, positions, interleaved), CLOSE)
    heads_first = ejkernel.rope(q.swapaxes(0, 1), *tables, interleaved=interleaved, layout="BHTD")
    check_close("heads first", heads_first.swapaxes(0, 1), turned(q, positions, interleaved), CLOSE)
    for got, x in zip(ejkernel.fused_qk_norm_rope(q, k, *tables, epsilon=1e-5, interleaved=interleaved), (q, k), strict=True):
        check_close("fused", got, turned(normed(x, 8), positions, interleaved), CLOSE)
    gradient = jax.grad(lambda x: ejkernel.rope(x, *tables, interleaved=interleaved).sum())(jnp.asarray(q))
    assert gradient.shape == q.shape and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_in_the_order_of_the_other_pairs_are_refused(interleaved: bool) -> None:
    x = normal(1, 5, 2, 8)
    cos, sin = ejkernel.LlamaRotaryEmbedding(8, interleaved=not interleaved)(np.arange(5))
    alike, wanted = ("both halves", "neighbours") if interleaved else ("neighbours", "both halves")
    message = f"cos: got a table with {alike} alike, expected {wanted} alike with interleaved={interleaved}"
    for call in (
        lambda: ejkernel.rope(x, cos, sin, interleaved=interleaved),
        lambda: ejkernel.llama_rope(x, x, np.asarray(cos), np.asarray(sin), interleaved=interleaved),
        lambda: ejkernel.fused_qk_norm_rope(x, x, cos, sin, interleaved=interleaved),
        lambda: ejkernel.rope(np.pad(x, [(0, 0)] * 3 + [(0, 4)]), cos, sin, rotary_dim=8, interleaved=interleaved),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_tables_of_no_order_are_taken() -> None:
    """Position 0 alone, two channels, and tables that no embedding made."""
    x = normal(1, 1, 2, 8)
    cos, sin = ejkernel.LlamaRotaryEmbedding(8)(np.zeros(1, int))
    assert np.array_equal(ejkernel.rope(x, cos, sin, interleaved=True), x)
    own = normal(1, 8)
    even, odd = x[..., ::2], x[..., 1::2]
    other = np.stack([-odd, even], -1).reshape(x.shape)
    check_close("own tables", ejkernel.rope(x, own, own, interleaved=True), (x + other) * own, CLOSE)
    two = ejkernel.LlamaRotaryEmbedding(2)(np.arange(3, 4))
    check_close(
        "two channels", ejkernel.rope(x[..., :2], *two, interleaved=True), turned(x[..., :2], np.array([3]), True), CLOSE
    )


def test_embedding_options_are_checked() -> None:
    with pytest.raises(ValueError, match="per_pair: got True, expected False with interleaved=True"):
        ejkernel.LlamaRotaryEmbedding(8, interleaved=True, per_pair=True)
    with pytest.raises(TypeError, match="interleaved: got 1, expected a bool"):
        ejkernel.LlamaRotaryEmbedding(8, interleaved=1)  # pyright: ignore[reportArgumentType]


# Attention with a prefix of another length in each row


def test_prefixes_of_rows() -> None:
    """PaliGemma's: image and prompt see each other, the suffix is causal. Rows of one prefix are those of `prefix=`."""
    q, k, v = normal(3, 9, 4, 8), normal(3, 9, 2, 8), normal(3, 9, 2, 8)
    prefixes = [0, 4, 9]

    def attend(q: Any, k: Any, v: Any, prefixes: Any) -> Any:
        return ejkernel.flash_attention(q, k, v, mask_info=ejkernel.MaskInfo.from_prefix_lengths(prefixes, 9))

    out = jax.jit(attend)(q, k, v, jnp.array(prefixes))
    gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x, jnp.array(prefixes)))), (0, 1, 2))(*map(jnp.asarray, (q, k, v)))
    for row, prefix in enumerate(prefixes):
        arrays = tuple(jnp.asarray(x[row : row + 1]) for x in (q, k, v))
        alone = ejkernel.MaskInfo(causal=True, prefix=prefix)

        def one(*x: Any, alone: Any = alone) -> Any:
            return ejkernel.flash_attention(*x, mask_info=alone)

        check_close("out", out[row : row + 1], one(*arrays), CLOSE)
        wanted = jax.grad(lambda *x, one=one: jnp.sum(jnp.sin(one(*x))), (0, 1, 2))(*arrays)
        for gradient, expected in zip(gradients, wanted, strict=True):
            check_close("gradient", gradient[row : row + 1], expected, CLOSE)
