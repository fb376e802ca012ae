"""Wrong values of each kind of argument are refused by name, before anything is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import ejkernel
from ejkernel.masks import MaskInfo

HEADS, PER_HEAD = np.ones((1, 8, 2, 4), np.float32), np.ones((1, 8, 2), np.float32)
CHANNELS, STARTS = np.ones((2, 4), np.float32), np.array([0, 8])
REQUIRED = {
    "gated_delta_rule": {"query": HEADS, "key": HEADS, "value": HEADS, "beta": PER_HEAD},
    "kernel_delta_attention": {"query": HEADS, "key": HEADS, "value": HEADS, "beta": PER_HEAD},
    "rwkv6": {"r": HEADS, "k": HEADS, "v": HEADS, "w": -HEADS, "u": CHANNELS},
    "rwkv7": dict.fromkeys(("r", "w", "k", "v", "a", "b"), HEADS),
    "rwkv7_mul": dict.fromkeys(("r", "w", "k", "v", "kk", "a"), HEADS),
    "recurrent_attention": dict.fromkeys(("query", "key", "value"), HEADS),
    "gla_attention": dict.fromkeys(("query", "key", "value"), HEADS),
    "flash_attention": dict.fromkeys(("query", "key", "value"), HEADS),
    "scaled_dot_product_attention": dict.fromkeys(("query", "key", "value"), HEADS),
    "attention": dict.fromkeys(("query", "key", "value"), HEADS),
    "flash_attn_varlen": {**dict.fromkeys("qkv", HEADS[0]), "cu_seqlens_q": STARTS},
    "ragged_gated_delta_rule": {
        **dict.fromkeys(("query", "key", "value"), HEADS[0]),
        "beta": PER_HEAD[0],
        "recurrent_state": np.zeros((3, 2, 4, 4), np.float32),
        "query_start_loc": STARTS,
        "state_indices": np.array([1]),
    },
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function, given in REQUIRED.items() for name in given])
def test_none_for_a_required_array(function: str, name: str) -> None:
    given: dict[str, Any] = {key: jnp.asarray(value) for key, value in REQUIRED[function].items() if key != name}
    if function == "flash_attn_varlen":
        given |= {"max_seqlens_q": 8, "max_seqlens_k": 8}
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b|\b{dict(q='query', k='key', v='value').get(name, name)}\b"):
        getattr(ejkernel, function)(**given, **{name: None})


@pytest.mark.parametrize("empty", [(), []])
@pytest.mark.parametrize("function", ["flash_attention", "gated_delta_rule", "recurrent_attention", "attention"])
def test_no_platform(function: str, empty: Any) -> None:
    given = {name: jnp.asarray(value) for name, value in REQUIRED[function].items()}
    with pytest.raises(ValueError, match=r"^platform: got .*, expected at least one platform; None or 'auto'"):
        getattr(ejkernel, function)(**given, platform=empty)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("value", "kind"), [(1.5, ValueError), (-0.1, ValueError), ("x", TypeError), (None, TypeError)])
def test_probability(value: Any, kind: type[Exception], deterministic: bool) -> None:
    with pytest.raises(kind, match=r"^dropout_prob: got"):
        ejkernel.attention(*[jnp.asarray(HEADS)] * 3, dropout_prob=value, deterministic=deterministic)
    with pytest.raises(kind, match=r"^dropout_prob: got"):
        ejkernel.flash_attention(*[jnp.asarray(HEADS)] * 3, dropout_prob=value)


@pytest.mark.parametrize("seed", [1.5, "x", True, -1])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_seed(seed: Any, rate: float) -> None:
    with pytest.raises((TypeError, ValueError), match=r"dropout_seed"):
        ejkernel.flash_attention(*[jnp.asarray(HEADS)] * 3, dropout_prob=rate, dropout_seed=seed)


@pytest.mark.parametrize("argument", ["in_specs", "out_specs"])
@pytest.mark.parametrize("function", ["flash_attention", "recurrent_attention", "gated_delta_rule"])
def test_an_axis_that_the_mesh_lacks(function: str, argument: str) -> None:
    specs = {"in_specs": (PartitionSpec("data"),), "out_specs": PartitionSpec("data")}
    specs[argument] = (PartitionSpec(("data", "zz")),) if argument == "in_specs" else PartitionSpec("zz")
    given = {name: jnp.asarray(value) for name, value in REQUIRED[function].items()}
    with pytest.raises(ValueError, match=rf"^{argument}: got axis 'zz', expected axes of the mesh, 'data'"):
        getattr(ejkernel, function)(**given, mesh=jax.make_mesh((1,), ("data",)), **specs)


@pytest.mark.parametrize(
    "function", ["flash_attention", "recurrent_attention", "gated_delta_rule", "scaled_dot_product_attention"]
)
def test_arrays_without_a_spec(function: str) -> None:
    given = {name: jnp.asarray(value) for name, value in REQUIRED[function].items()}
    specs = {"in_specs": (PartitionSpec(),) * 2, "out_specs": PartitionSpec()}
    with pytest.raises(
        ValueError, match=r"^in_specs: got 2 entries, none for value.*, expected one for each of query, key, value"
    ):
        getattr(ejkernel, function)(**given, mesh=jax.make_mesh((1,), ("data",)), **specs)


@pytest.mark.parametrize("dtype", [jnp.uint32, np.uint32, np.int64])
def test_ids_that_int32_cannot_hold(dtype: Any) -> None:
    ids = (jnp if dtype is jnp.uint32 else np).array([[7, 2**31]], dtype)
    with pytest.raises(ValueError, match=r"expected values that int32 can hold"):
        MaskInfo.from_segments(ids)
    MaskInfo.from_segments(ids - ids + 3)


@pytest.mark.parametrize(("is_causal", "causal"), [("no", False), (True, "no"), (False, 2), (None, False), (0, False)])
def test_flags(is_causal: Any, causal: Any) -> None:
    with pytest.raises(TypeError, match=r"causal"):
        ejkernel.scaled_dot_product_attention(*[jnp.asarray(HEADS)] * 3, is_causal=is_causal, causal=causal)


def test_a_traced_value_for_a_static_argument() -> None:
    def layer(x: Any, cap: Any) -> Any:
        return ejkernel.flash_attention(x, x, x, causal=True, logits_soft_cap=cap), None

    with pytest.raises(
        TypeError, match=r"^logits_soft_cap: got a traced value, expected .*; mark it static in jax.jit, or choose"
    ):
        jax.lax.scan(layer, jnp.asarray(HEADS), jnp.array([1.0, 4.0]))
