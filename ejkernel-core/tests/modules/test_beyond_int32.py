"""Integers that int32 does not hold count as the nearest end, or are refused: none wraps to another number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.utils.integers import as_int32, narrowed

RNG = np.random.default_rng(0)
HUGE = 2**32
"""As int32 it would be 0."""


def normal(*shape: int) -> Any:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64, np.int16, np.int32])
def test_ends(dtype: Any) -> None:
    info = np.iinfo(dtype)
    values = np.array([info.min, 0, 7, info.max], dtype)
    wanted = np.clip(values.astype(object), -(2**31), 2**31 - 1).astype(np.int32)
    found = as_int32(values)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, wanted)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jax.jit(as_int32)(jnp.asarray(values)), wanted)
    np.testing.assert_array_equal(as_int32(HUGE), 2**31 - 1)


def test_what_is_narrowed() -> None:
    """NumPy integers of 64 bits without x64; seeds keep their bits, and ids of segments their differences."""
    np.testing.assert_array_equal(narrowed("top_k", np.array([HUGE])), [2**31 - 1])
    seed = np.array([HUGE + 5])
    assert narrowed("dropout_seed", seed) is seed
    with pytest.raises(ValueError, match="segment_ids: got values in"):
        narrowed("segment_ids", np.array([0, HUGE]))
    with jax.enable_x64(True), pytest.raises(ValueError, match="segments: got values in"):
        narrowed("segments", jnp.array([0, HUGE]))
    given = jnp.array([1, 2])
    assert narrowed("top_k", given) is given


def kept(experts: Any) -> Any:
    out = ejkernel.moe_permute(X, experts, 4)
    return out.group_sizes


def sampled(top_k: Any) -> Any:
    """How many of 64 almost equal tokens are drawn."""
    keys = jax.random.split(jax.random.key(0), 100)
    found = jax.vmap(lambda key: ejkernel.sample_tokens(jnp.zeros((1, 64)).at[0, 3].set(0.1), key, top_k=top_k)[0])(keys)
    return len(np.unique(found)) > 20


def losses(labels: Any) -> Any:
    return ejkernel.fused_cross_entropy(LOGITS, labels, reduction="none").loss


def decoded(tables: Any) -> Any:
    """Of two pages."""
    lens = np.array([8, 8], np.int32)
    return ejkernel.page_attention(normal_query, PAGES, PAGES, lens, tables)


X, LOGITS = normal(3, 8), normal(3, 5)
normal_query, PAGES = normal(2, 2, 8), normal(3, 2, 4, 8)
FORMS = {
    "experts": (kept, [[0, 1], [2, HUGE], [3, 3]], [[0, 1], [2, 4], [3, 3]]),
    "top_k": (sampled, [HUGE + 1], [64]),
    "pages": (decoded, [[0, 1], [2, HUGE]], [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_functions(form: str) -> None:
    """As what is out of range by one."""
    run, huge, wanted = FORMS[form]
    right = run(np.array(wanted, np.int32))
    np.testing.assert_array_equal(run(np.array(huge, np.int64)), right)
    unsigned = np.where(np.array(huge) >= HUGE, 2**32 - 1, huge).astype(np.uint32)
    np.testing.assert_array_equal(run(jnp.asarray(unsigned)), right)
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(run)(jnp.array(huge)) if form != "top_k" else run(jnp.array(huge)), right, rtol=1e-6)


def test_labels() -> None:
    """Refused where they are known; otherwise as a label past the vocabulary."""
    with pytest.raises(ValueError, match="targets: got"):
        losses(np.array([0, HUGE, 2]))
    wanted = jax.jit(losses)(jnp.array([0, 5, 2]))
    np.testing.assert_array_equal(jax.jit(losses)(jnp.array([0, 2**32 - 1, 2], jnp.uint32)), wanted)
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(losses)(jnp.array([0, HUGE, 2])), wanted, rtol=1e-6)
