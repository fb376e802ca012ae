"""Tiny models of all four kinds in both builds, in float32 so that their numbers can be compared."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_train import __main__ as command, cost, data, float8, plain, report, step as steps
from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import DEFAULTS, MODELS, TrainConfig
from ejkernel_train.operations import choose
from ejkernel_train.step import initialise

TINY = TrainConfig(dtype="float32")

LLAMA = {"flash_attention", "rms_norm", "add_rms_norm", "rope", "cross_entropy", "gated_linear_unit"}
OPERATIONS = {
    "llama": LLAMA,
    "hybrid": {*LLAMA - {"rope"}, "qk_norm_rope", "delta_rule", "causal_conv1d"},
    "mamba2": {"linear_recurrence", "causal_conv1d", "rms_norm", "cross_entropy"},
    "moe": {*LLAMA, "grouped_matmul", "moe_route", "moe_permute", "moe_unpermute"},
}
"""What each model calls, by core's names."""

TOLERANCE = {"llama": 1e-4, "hybrid": 0.01, "mamba2": 1e-4, "moe": 1e-3}
"""Nats between both builds' losses at any of 20 steps. The tiny hybrid magnifies rounding: its heads of 16 channels are normed
where a query and a key may be nearly orthogonal. So it learns more slowly here."""

SLOWER = {"hybrid": {"learning_rate": 1e-3}}


@functools.cache
def text() -> np.ndarray:
    return data.load()


@functools.cache
def compared(model: str) -> dict[str, Any]:
    fast = dataclasses.replace(TINY, model=model, **SLOWER.get(model, {}))
    return report.run([fast, dataclasses.replace(fast, kernels="plain")], text(), rounds=2)


@pytest.mark.unsampled
@pytest.mark.parametrize("model", MODELS)
def test_both_builds_learn_the_same(model: str):
    """By ejkernel's operations in both phases, and without."""
    fast, plain = compared(model)["builds"]
    assert len(fast["losses"]) == 20
    np.testing.assert_allclose(fast["losses"], plain["losses"], atol=TOLERANCE[model], rtol=0)
    assert fast["losses"][0] == pytest.approx(np.log(264), abs=0.6)
    assert fast["losses"][-1] < fast["losses"][0] - (0.7 if model in SLOWER else 1.5)
    assert plain["agreement"]["agrees"] and plain["agreement"]["gradient"] < 1e-3
    found = {tuple(line.split()[:2]) for line in fast["implementations"]}
    assert found == {(name, phase) for name in OPERATIONS[model] for phase in ("forward", "backward")}
    assert plain["implementations"] == []


def test_record():
    record = compared("llama")
    fast = record["builds"][0]
    assert fast["trace_seconds"] > 0 and fast["lower_seconds"] > 0 and fast["compile_seconds"] > 0
    assert fast["tokens_per_second"] == pytest.approx(4 * 128 / fast["step_seconds"])
    assert fast["program_bytes"] > 12 * record["parameters"]  # parameters and two moments in float32
    assert fast["share_of_peak"] is None  # of a CPU
    assert json.loads(json.dumps(record))["builds"] == record["builds"]


def test_operations_that_stay_plain():
    config = dataclasses.replace(TINY, plain=("attention", "rope"), steps=2)
    record = report.run([config], text())
    found = {line.split()[0] for line in record["builds"][0]["implementations"]}
    assert found == LLAMA - {"flash_attention", "rope"}
    np.testing.assert_allclose(record["builds"][0]["losses"], compared("llama")["builds"][0]["losses"][:2], atol=1e-5)


@pytest.mark.unsampled
@pytest.mark.parametrize("options", [{"remat": "full", "layers": "unroll"}, {"remat": "dots"}], ids=str)
def test_what_is_computed_again_changes_nothing(options: dict[str, Any]):
    config = dataclasses.replace(TINY, steps=3, **options)
    losses = report.run([config], text())["builds"][0]["losses"]
    np.testing.assert_allclose(losses, compared("llama")["builds"][0]["losses"][:3], atol=1e-5)


def test_a_step_of_many_layers_is_tuned_on_two(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU. The whole step has a block's operations four times, the one before it twice."""
    config = dataclasses.replace(TINY, repeats=4, layers="unroll")
    assert steps.lower_step(config).tuned is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(steps, "choose", lambda kernels, plain: choose("plain"))  # ours would look for a GPU
    lowered = steps.lower_step(config)
    assert lowered.tuned is not None
    whole, first = (program.as_text().count("call @repeat") for program in (lowered.program, lowered.tuned))
    assert (whole, first) == (2 * 4, 2 * 2)
    assert lowered.compile().compile_seconds > 0
    assert steps.lower_step(dataclasses.replace(config, layers="scan")).tuned is None


def test_bfloat16_learns_alike():
    losses = report.run([dataclasses.replace(TINY, dtype="bfloat16")], text())["builds"][0]["losses"]
    np.testing.assert_allclose(losses, compared("llama")["builds"][0]["losses"], atol=0.02)


@pytest.mark.unsampled
@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
def test_float8_learns_alike(kernels: str):
    config = dataclasses.replace(TINY, dtype="bfloat16", float8=True, kernels=kernels)
    build, losses = report.Build(config), compared("llama")["builds"][0]["losses"]
    for step in range(config.steps):
        build.advance(data.batch(text(), config.seed, step, config.batch, config.length))
    np.testing.assert_allclose(build.losses, losses, atol=0.03)
    assert build.losses != pytest.approx(losses, abs=1e-4)
    gate = build.state.model.blocks[0].feed_forward.gate
    largest = jnp.max(jnp.abs(gate.weight), axis=(1, 2))  # of each block, after the last step
    np.testing.assert_allclose(gate.scales[:, 1], largest / 448, rtol=0.05)
    assert jnp.all(gate.scales[:, 0] < 8 / 448) and jnp.all(gate.scales > 0)
    assert build.state.moments[1][0].mu.blocks[0].feed_forward.gate.scales is None


def test_scales_follow_the_largest_values():
    """The forward uses the scales given; the backward hands out what is largest in this step."""
    x, weight = jax.random.normal(jax.random.key(0), (32, 16)), jax.random.normal(jax.random.key(1), (16, 48))
    scales = jnp.array([5 / 448, 5 / 448, 5 / 57344])
    operations = float8.Float8(plain.scaled_matmul, plain.quantize_float8)
    linear = lambda x, weight, scales: float8.linears(operations, x, (weight,), (scales,), (None,))[0]
    out, pull = jax.vjp(linear, x, weight, scales)
    cotangent = jax.random.normal(jax.random.key(2), out.shape)
    d_x, d_weight, largest = pull(cotangent)
    exact = (x @ weight, cotangent @ weight.T, x.T @ cotangent)
    for found, wanted in zip((out, d_x, d_weight), exact, strict=True):
        error = jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted)
        assert 1e-3 < error < 0.08  # of three bits of mantissa, two in cotangents
    np.testing.assert_allclose(largest, [jnp.max(jnp.abs(each)) for each in (x, weight, cotangent)])
    following = float8.next_scales(scales, largest)
    np.testing.assert_allclose(following, np.maximum(0.9 * scales, largest / np.array(float8.MOST)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_of_one_input_compute_as_each_alone(dtype: str):
    """Also where their weights were quantized before, from which nothing is differentiated."""
    keys = jax.random.split(jax.random.key(3), 6)
    x = jax.random.normal(keys[0], (32, 16)).astype("bfloat16")
    weights = tuple(jax.random.normal(key, (16, size)).astype(dtype) for key, size in zip(keys[1:3], (48, 32), strict=True))
    scales = tuple(jnp.array([5 / 448, most / 448, most / 57344]) for most in (5, 4))
    cotangents = tuple(
        jax.random.normal(key, (32, size)).astype(x.dtype) for key, size in zip(keys[3:5], (48, 32), strict=True)
    )
    operations = float8.Float8(plain.scaled_matmul, plain.quantize_float8)
    narrows = tuple(float8.narrow(operations, weight, own) for weight, own in zip(weights, scales, strict=True))

    def run(weights: Any, scales: Any, narrows: Any, cotangents: Any) -> Any:
        out, pull = jax.vjp(lambda *arrays: float8.linears(operations, *arrays, narrows), x, weights, scales)
        return out, *pull(cotangents)

    alone = [run((w,), (s,), (None,), (c,)) for w, s, c in zip(weights, scales, cotangents, strict=True)]
    out, d_weights, largest = (tuple(each[part][0] for each in alone) for part in (0, 2, 3))
    for given in ((None, None), narrows, (narrows[0], None)):
        found = run(weights, scales, given, cotangents)
        jax.tree.map(np.testing.assert_array_equal, (found[0], *found[2:]), (out, d_weights, largest))
        np.testing.assert_array_equal(found[1], alone[1][1] + alone[0][1])
        assert all(gradient.dtype == dtype for gradient in found[2])


def test_resuming_is_exact(tmp_path: Path):
    config = dataclasses.replace(TINY, steps=10)
    with Checkpoints(tmp_path) as checkpoints:
        whole = report.run([config], text(), checkpoints=checkpoints, save_every=6)
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="has 10 steps already"):
        report.run([config], text(), checkpoints=checkpoints)
    shutil.rmtree(tmp_path / "10")
    with Checkpoints(tmp_path) as checkpoints:
        resumed = report.run([config], text(), checkpoints=checkpoints)
    assert resumed["first_step"] == 7
    assert resumed["builds"][0]["losses"] == whole["builds"][0]["losses"][6:]


def test_batches():
    tokens = np.arange(100, dtype=np.int32)
    first = data.batch(tokens, 0, 3, 4, 16)
    assert first.shape == (4, 17)
    assert np.all(np.diff(first) == 1)
    np.testing.assert_array_equal(first, data.batch(tokens, 0, 3, 4, 16))
    assert not np.array_equal(first, data.batch(tokens, 0, 4, 4, 16))
    last = max(data.batch(tokens, 0, step, 4, 98).max() for step in range(9))
    assert last == 99
    with pytest.raises(ValueError, match="has 100 tokens, and a window needs 101"):
        data.batch(tokens, 0, 0, 1, 100)


def test_text_files(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"ab")
    (tmp_path / "b").write_bytes(b"c")
    assert data.load([tmp_path / "a", tmp_path / "b"]).tolist() == [256, 97, 98, 256, 99]
    assert len(text()) > 400_000


def test_operations_are_counted():
    """Against the products of a llama written out, and of a mixture by its share of experts."""
    config = dataclasses.replace(TINY, batch=2, length=8)
    model = jax.eval_shape(lambda: initialise(config)).model
    products = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 264 * 64
    norms = 5 * 64
    pairs = sum(range(1, 9))
    attention = 2 * 2 * (2 * 16) * 4 * pairs * 2
    assert cost.parameters(model) == products + norms
    assert cost.step_operations(config, model) == 6 * (products + norms) * 16 + 3 * attention
    mixture = jax.eval_shape(lambda: initialise(dataclasses.replace(TINY, model="moe"))).model
    assert cost.parameters(mixture) - cost.active_parameters(mixture) == 2 * (4 - 2) * 3 * 64 * 64


@pytest.mark.unsampled
@pytest.mark.parametrize(("size", "least", "most"), [("125m", 105e6, 165e6), ("1.3b", 1.2e9, 1.6e9)])
@pytest.mark.parametrize("model", MODELS)
def test_sizes(model: str, size: str, least: float, most: float):
    state = jax.eval_shape(lambda: initialise(TrainConfig(model=model, size=size)))
    assert least < cost.parameters(state.model) < most
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.model))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "record.json"
    asked = "--compare --steps 2 --batch 2 --length 32 --dtype float32 --plain rope --peak 1e12"
    assert command.main([*asked.split(), "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [(build["kernels"], build["plain"]) for build in record["builds"]] == [("plain", []), ("ejkernel", ["rope"])]
    assert record["builds"][0]["share_of_peak"] > 0
    assert record["builds"][0]["steps_seconds"] and record["date"] and record["driver"] is None
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--plain rop", "no operation is called rop; there are attention,"),
        ("--text nowhere", "nowhere"),
        ("--mesh data=x", "--mesh has 'data=x'; write AXIS=DEVICES"),
        ("--mesh data=64", "needs 64 devices, and there are 8"),
        ("--compare plain,theirs", "--compare has theirs; name builds of ejkernel, plain, peers"),
    ],
)
def test_mistakes(asked: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert command.main(asked.split()) == 2
    assert said in capsys.readouterr().err


def test_defaults_are_fields():
    for fields in DEFAULTS.values():
        TrainConfig(**fields)
