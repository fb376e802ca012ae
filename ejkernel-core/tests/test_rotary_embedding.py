"""Rotary embeddings of public model configurations. rotary_embedding.json holds what transformers computes from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import LlamaRotaryEmbedding, llama_rope

FIXTURE = json.loads(Path(__file__).with_suffix(".json").with_name("rotary_embedding.json").read_text())
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 8.0],
    "original_max_position_embeddings": 64,
}


def angles_of(embedding: LlamaRotaryEmbedding, positions: Any, length: Any = None) -> np.ndarray:
    cos, sin = embedding(positions, length)
    return np.arctan2(np.asarray(sin, np.float64), np.asarray(cos, np.float64))


@pytest.mark.parametrize("name", FIXTURE["frequencies"])
def test_frequencies_of_public_configurations(name: str) -> None:
    entry = FIXTURE["frequencies"][name]
    embedding = LlamaRotaryEmbedding.from_config(entry["config"], layer_type=entry["layer_type"], per_pair=True)
    assert embedding.dim == 2 * entry["pairs"]
    np.testing.assert_allclose(embedding.attention_factor, entry["attention_factor"], rtol=1e-7)
    expected = np.asarray(entry["frequencies"])
    at_one = jnp.ones(1, jnp.int32)
    for length in (entry["length"], None if entry["length"] is None else jnp.asarray(entry["length"])):
        cos, sin = embedding(at_one, length)
        np.testing.assert_allclose(cos[0, :: entry["every"]], entry["attention_factor"] * np.cos(expected), atol=1e-6)
        np.testing.assert_allclose(sin[0, :: entry["every"]], entry["attention_factor"] * np.sin(expected), atol=1e-6)
    if name != "dynamic-long" and name != "phi-3-long":
        np.testing.assert_allclose(embedding.frequencies[:: entry["every"]], expected, rtol=3e-6)


@pytest.mark.parametrize("name", FIXTURE["sections"])
def test_sections_of_multimodal_positions(name: str) -> None:
    entry = FIXTURE["sections"][name]
    embedding = LlamaRotaryEmbedding.from_config(entry["config"], per_pair=True)
    positions = jnp.asarray(entry["positions"])
    for got, expected in zip(embedding(positions), (entry["cos"], entry["sin"]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    batched = embedding(positions[:, None])
    assert batched[0].shape == (1, 4, 8)
    text = LlamaRotaryEmbedding(16, entry["config"]["rope_parameters"]["rope_theta"], per_pair=True)(jnp.arange(5))
    np.testing.assert_array_equal(embedding(jnp.broadcast_to(jnp.arange(5), (3, 5)))[0], text[0])
    with pytest.raises(ValueError, match=r"position_ids: got shape \(5,\), expected \[3,B,T\].*broadcast_to"):
        embedding(jnp.arange(5))


@pytest.mark.parametrize("floating", [False, True])
def test_large_positions_lose_nothing(floating: bool) -> None:
    """The float32 product is off by a radian at 10^7."""
    positions = np.array([2**24 - 1, 10_000_001, -9_999_999, 2**31 - 1, -(2**31)])[: 3 if floating else 5]
    embedding = LlamaRotaryEmbedding(128, per_pair=True)
    exact = np.asarray(positions, np.float64)[:, None] * 10000.0 ** (-np.arange(0, 128, 2) / 128)
    cos, sin = jax.jit(embedding)(jnp.asarray(positions, jnp.float32 if floating else jnp.int32))
    np.testing.assert_allclose(cos[:3], np.cos(exact[:3]), atol=1e-6)
    np.testing.assert_allclose(sin[:3], np.sin(exact[:3]), atol=1e-6)
    np.testing.assert_allclose(cos, np.cos(exact), atol=3e-5)


def test_positions_between_integers() -> None:
    embedding = LlamaRotaryEmbedding(8, per_pair=True)
    positions = jnp.array([-0.25, 1000.5])
    exact = np.asarray(positions, np.float64)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(embedding(positions)[1], np.sin(exact), atol=1e-6)
    slope = jax.grad(lambda p: embedding(p)[1].sum())(positions)
    np.testing.assert_allclose(slope, (np.cos(exact) * 10000.0 ** (-np.arange(0, 8, 2) / 8)).sum(1), atol=1e-5)


@pytest.mark.parametrize("length", [64, 65, 300])
@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=lambda scaling: scaling["rope_type"])
def test_the_length_may_be_traced(scaling: Any, length: int) -> None:
    embedding = LlamaRotaryEmbedding(4, scaling=scaling, max_position_embeddings=64, per_pair=True)
    positions = jnp.arange(length)
    given = angles_of(embedding, positions, length)
    np.testing.assert_array_equal(angles_of(embedding, positions), given)  # the largest position + 1
    traced = angles_of(jax.jit(embedding), positions, jnp.asarray(length))  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(np.cos(traced - given), 1, atol=1e-6)
    if scaling is DYNAMIC:
        base = 10000.0 * (2 * max(length, 64) / 64 - 1) ** 2
        frequencies = np.array([1, base**-0.5])
    else:
        frequencies = np.array([1, 0.01]) / (LONGROPE["long_factor"] if length > 64 else LONGROPE["short_factor"])
    np.testing.assert_allclose(np.cos(given - np.arange(length)[:, None] * frequencies), 1, atol=1e-6)


def test_a_fixed_base() -> None:
    """NTK-aware scaling without a length, and HunYuan's spelling of it."""
    expected = (10000.0 * 4.0 ** (8 / 6)) ** (-np.arange(0, 8, 2) / 8)
    for scaling in ({"rope_type": "ntk", "factor": 4.0}, {"type": "dynamic", "factor": 1.0, "alpha": 4.0}):
        np.testing.assert_allclose(LlamaRotaryEmbedding(8, scaling=scaling).frequencies, expected, rtol=1e-6)


def test_it_shows_what_it_is_made_of() -> None:
    made = LlamaRotaryEmbedding(8, 5e5, scaling={"rope_type": "linear", "factor": 2.0}, per_pair=True)
    shown = "LlamaRotaryEmbedding(dim=8, base=500000, scaling={'rope_type': 'linear', 'factor': 2.0}, per_pair=True)"
    assert repr(made) == shown
    np.testing.assert_array_equal(eval(shown).frequencies, made.frequencies)
    assert repr(LlamaRotaryEmbedding(8, interleaved=True)).endswith("scaling={}, interleaved=True)")


def test_a_config_of_transformers_is_taken_as_it_is() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"rope_theta": 5e5, "head_dim": 16}

    assert repr(LlamaRotaryEmbedding.from_config(Config())) == repr(LlamaRotaryEmbedding.from_config(Config().to_dict()))
    with pytest.raises(TypeError, match="config: got str, expected a mapping or a config of transformers"):
        LlamaRotaryEmbedding.from_config("llama")  # pyright: ignore[reportArgumentType]


def test_layer_types_and_older_spellings() -> None:
    older = {
        "head_dim": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    newer = FIXTURE["frequencies"]["gemma-3-full"]["config"]
    for layer in ("full_attention", "sliding_attention"):
        one, other = (LlamaRotaryEmbedding.from_config(config, layer_type=layer) for config in (older, newer))
        np.testing.assert_array_equal(one.frequencies, other.frequencies)
    for config in (older, newer):
        with pytest.raises(ValueError, match="layer_type: got None, expected one of full_attention, sliding_attention"):
            LlamaRotaryEmbedding.from_config(config)
    neox = {"hidden_size": 128, "num_attention_heads": 2, "rotary_pct": 0.25, "rotary_emb_base": 10000}
    assert LlamaRotaryEmbedding.from_config(neox).dim == 16
    assert LlamaRotaryEmbedding.from_config({"rope_theta": 1e4, "rotary_dim": 24, "head_dim": 64}).dim == 24
    assert LlamaRotaryEmbedding.from_config({"rope_theta": 1e4}, head_size=32).dim == 32
    latent = {"rope_theta": 1e4, "head_dim": 64, "qk_rope_head_dim": 16, "partial_rotary_factor": 0.25}
    assert LlamaRotaryEmbedding.from_config(latent).dim == 16  # the same said twice
    assert LlamaRotaryEmbedding.from_config(latent, head_size=32).dim == 8


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"head_dim": 8}, {}, "config: got no rope_theta.*'rope_theta': 10000"),
        ({"text_config": {}}, {}, r"config: got no rope_theta.*config\['text_config'\]"),
        ({"rope_theta": 1e4}, {}, "head_size: got None"),
        ({"rope_theta": 1e4, "head_dim": 8}, {"layer_type": "full"}, "layer_type: got full, expected None"),
        ({"rope_theta": 1e4, "head_dim": 8, "rope_scaling": {"type": "linear", "factr": 2.0}}, {}, "scaling: got factr with"),
        (
            {"rope_theta": 1e4, "head_dim": 8, "rope_scaling": {"type": "linear", "factor": -2.0}},
            {},
            "'factor'.*-2.0, expected",
        ),
        ({"rope_theta": 1e4, "head_dim": 8, "rope_scaling": DYNAMIC}, {}, "max_position_embeddings: got None"),
        ({"rope_theta": 1e4, "head_dim": 8, "rope_scaling": LONGROPE}, {}, "'short_factor'.*2 numbers, expected 4"),
        ({"rope_theta": 1e4, "head_dim": 8, "rope_scaling": {"mrope_section": [1, 1, 1]}}, {}, "mrope_section .*add up to 4"),
    ],
)
def test_refused_configurations(config: Any, options: Any, message: str) -> None:
    if "rope_scaling" in config and config["rope_scaling"] is LONGROPE:
        config = {**config, "max_position_embeddings": 128}
    with pytest.raises(ValueError, match=message):
        LlamaRotaryEmbedding.from_config(config, **options)


def turns(dim: int, base: float, original: float) -> np.ndarray:
    """How often each pair turns within the original length."""
    return original * base ** (-np.arange(0, dim, 2) / dim) / (2 * math.pi)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama3_without_a_ramp(spelling: str) -> None:
    """Llama 4 Scout: both frequency factors are 1, so pairs that turn less than once are stretched and no others."""
    scaling = {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    config = {"head_dim": 128, "max_position_embeddings": 10485760}
    config |= (
        {"rope_theta": 5e5, spelling: scaling} if spelling == "rope_scaling" else {spelling: {**scaling, "rope_theta": 5e5}}
    )
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    expected = np.where(turns(128, 5e5, 8192) < 1, plain / 16, plain)
    np.testing.assert_allclose(LlamaRotaryEmbedding.from_config(config).frequencies, expected, rtol=1e-6)
    exact = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0}
    exact["original_max_position_embeddings"] = 4 * math.pi  # the first pair turns twice
    np.testing.assert_allclose(LlamaRotaryEmbedding(4, 100.0, scaling=exact).frequencies, [1, 0.1 / 4], rtol=1e-6)
    with pytest.raises(ValueError, match=r"low_freq_factor 3.0 and high_freq_factor 2.0, expected the first not above"):
        LlamaRotaryEmbedding(4, scaling={**exact, "low_freq_factor": 3.0})


YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "mscale": ({"mscale": 0.707, "mscale_all_dim": 1.0}, (1 + 0.0707 * math.log(8)) / (1 + 0.1 * math.log(8))),
    "mscale-0": ({"mscale": 1.0, "mscale_all_dim": 0}, 1 + 0.1 * math.log(8)),
    "attention-factor": ({"attention_factor": 1.5}, 1.5),
    "no-truncation": ({"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}, 1 + 0.1 * math.log(8)),
    "finetuned": ({"finetuned": True}, 1 + 0.1 * math.log(8)),
    "one-beta": ({"beta_fast": 1.0, "beta_slow": 1.0}, 1 + 0.1 * math.log(8)),
    "nothing": ({"attention_factor": None, "mscale": None}, 1 + 0.1 * math.log(8)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_forms_of_yarn(name: str) -> None:
    fields, factor = PUBLISHED[name]
    config = {"head_dim": 128, "rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": {**YARN, **fields}}
    embedding = LlamaRotaryEmbedding.from_config(config)
    plain = 1e4 ** (-np.arange(0, 64, 2) / 64)

    def pair_of(beta: float) -> float:
        return 64 * math.log(4096 / (2 * math.pi * beta)) / (2 * math.log(1e4))

    first, last = pair_of(fields.get("beta_fast", 32)), pair_of(fields.get("beta_slow", 1))
    if fields.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    stretched = np.clip((np.arange(32) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(embedding.frequencies, plain * (1 - stretched) + plain / 8 * stretched, rtol=1e-6)
    np.testing.assert_allclose(embedding.attention_factor, factor, rtol=1e-9)


def test_a_fixed_base_among_fields_of_yarn() -> None:
    """HunYuan's configurations, in which only alpha says something."""
    scaling = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    config = {"head_dim": 128, "rope_theta": 1e4, "max_position_embeddings": 262144}
    embedding = LlamaRotaryEmbedding.from_config({**config, "rope_scaling": {**scaling, "type": "dynamic"}})
    base = 1e4 * 1000.0 ** (128 / 126)
    np.testing.assert_allclose(embedding.frequencies, base ** (-np.arange(0, 128, 2) / 128), rtol=1e-6)
    assert embedding.attention_factor == 1
    del scaling["alpha"]
    with pytest.raises(ValueError, match="scaling: got beta_fast, beta_slow, mscale, mscale_all_dim with"):
        LlamaRotaryEmbedding.from_config({**config, "rope_scaling": {**scaling, "type": "dynamic"}})


@pytest.mark.parametrize("short", [1.25, 2.0])
@pytest.mark.parametrize("length", [64, 65])
def test_attention_factors_of_longrope(short: float, length: int) -> None:
    """PhiMoE says them, one for each table."""
    scaling = {**LONGROPE, "short_mscale": short, "long_mscale": 2.0}
    embedding = LlamaRotaryEmbedding(4, scaling=scaling, max_position_embeddings=256, per_pair=True)
    positions = jnp.arange(length)
    frequencies = np.array([1, 0.01]) / np.array(LONGROPE["long_factor"] if length > 64 else LONGROPE["short_factor"])
    expected = (2.0 if length > 64 else short) * np.cos(np.arange(length)[:, None] * frequencies)
    for given in (None, length):
        np.testing.assert_allclose(embedding(positions, given)[0], expected, atol=1e-5)
    traced = jax.jit(embedding)(positions, jnp.asarray(length))  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(traced[0], expected, atol=1e-5)


def test_partial_rotation_of_a_model() -> None:
    """GPT-NeoX: the first quarter of the channels turns, as complex numbers."""
    embedding = LlamaRotaryEmbedding.from_config({"head_dim": 32, "rope_theta": 1e4, "partial_rotary_factor": 0.25})
    q = jax.random.normal(jax.random.key(0), (2, 5, 3, 32))
    turned, _ = llama_rope(q, q, *embedding(jnp.arange(5)), rotary_dim=embedding.dim, platform="xla")
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    pairs = np.asarray(q[..., :4]) + 1j * np.asarray(q[..., 4:8])
    expected = pairs * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4:8], expected.imag, atol=1e-5)
    np.testing.assert_array_equal(turned[..., 8:], q[..., 8:])


def test_attention_factor_scales_both() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    cos, sin = LlamaRotaryEmbedding(8, scaling=scaling)(jnp.arange(9))
    np.testing.assert_allclose(jnp.hypot(cos, sin), 1 + 0.1 * math.log(4), rtol=1e-6)


@jax.numpy_rank_promotion("raise")
@jax.numpy_dtype_promotion("strict")
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32, jnp.int64, jnp.float64])
@pytest.mark.parametrize("scaling", [{}, DYNAMIC, LONGROPE], ids=["default", "dynamic", "longrope"])
def test_positions_of_any_type(scaling: Any, dtype: Any) -> None:
    embedding = LlamaRotaryEmbedding(4, scaling=scaling, max_position_embeddings=64, per_pair=True)
    expected = embedding(jnp.arange(70, dtype=jnp.int32))
    with jax.enable_x64(True):
        for function in (embedding, jax.jit(embedding)):
            for got, wanted in zip(function(jnp.arange(70).astype(dtype).reshape(2, 35)), expected, strict=True):
                assert got.dtype == jnp.float32
                np.testing.assert_allclose(got.reshape(70, 2), wanted, atol=5e-6)
    assert embedding(jnp.zeros((0,), jnp.int32))[0].shape == (0, 2)
