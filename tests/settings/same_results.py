"""Outputs and gradients of a public call, and that they are those of the same call without any setting."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from public_calls import CALLS, PublicCall


def results(call: PublicCall, arrays: dict[str, Any]) -> Any:
    """Outputs, and gradients of a fixed random projection of them."""

    def loss(moving: dict[str, Any]) -> Any:
        outputs = call.run({**arrays, **moving})
        floating = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        rng = np.random.default_rng(0)
        weights = [rng.standard_normal(leaf.shape).astype(np.float32) for leaf in floating]
        return sum(jnp.sum(leaf.astype(jnp.float32) * w) for leaf, w in zip(floating, weights, strict=True)), outputs

    gradients, outputs = jax.grad(loss, has_aux=True)({name: arrays[name] for name in call.floating})
    return outputs, gradients


@functools.cache
def expected(name: str, dtype: str) -> Any:
    call = CALLS[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.device_get(jax.jit(functools.partial(results, call))(call.in_dtype(dtype)))


def check(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree_util.tree_leaves_with_path(jax.device_get(got)), jax.tree.leaves(wanted), strict=True)
    for (path, one), other in pairs:
        one, other = (np.asarray(value, np.float64) for value in (one, other))
        largest = np.max(np.abs(other), initial=1.0, where=np.isfinite(other))
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * largest, err_msg=jax.tree_util.keystr(path))
