"""Every public function under JAX's own flags and inside its loops: values and gradients are those without them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_calls import CALLS
from same_results import check, expected, results

FLAGS: dict[str, dict[str, Any]] = {
    "x64": {"jax_enable_x64": True},
    "nans": {"jax_debug_nans": True},
    "infs": {"jax_debug_infs": True},
    "leaks": {"jax_check_tracer_leaks": True},
    "misses": {"jax_explain_cache_misses": True},
    "highest": {"jax_default_matmul_precision": "highest"},
    "softmax": {"jax_softmax_custom_jvp": False},
    "threefry": {"jax_threefry_partitionable": not jax.config.jax_threefry_partitionable},
    "transfers": {"jax_transfer_guard": "disallow"},
}
"""By a short name. Random bits are partitionable or not by JAX's version; the other way is tried."""


@contextlib.contextmanager
def flags(**values: Any) -> Iterator[None]:
    """Set flags of JAX for a while."""
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", CALLS)
def test_flag(name: str, flag: str):
    call, wanted = CALLS[name], expected(name, "float32")
    arrays = call.in_dtype("float32")
    with flags(**FLAGS[flag]):
        got = jax.jit(functools.partial(results, call))(arrays)
    check(got, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda leaf: leaf.dtype, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_without_jit(name: str):
    call = CALLS[name]
    with jax.disable_jit():
        got = call.run(call.in_dtype("float32"))
    check(got, expected(name, "float32")[0])


@pytest.mark.parametrize("name", CALLS)
def test_rematerialised_layers_in_a_scan(name: str):
    """Two layers of a model in one `jax.lax.scan`, each under `jax.checkpoint`."""
    call = CALLS[name]
    layers = {name: jnp.stack([value, value]) for name, value in call.in_dtype("float32").items()}
    run = jax.checkpoint(functools.partial(results, call))
    _, got = jax.jit(lambda layers: jax.lax.scan(lambda carry, layer: (carry, run(layer)), 0, layers))(layers)
    for layer in range(2):
        check(jax.tree.map(lambda leaf, layer=layer: np.asarray(leaf)[layer], got), expected(name, "float32"))
