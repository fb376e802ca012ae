"""Functions in the place of a library's attention function: masks and dropout are honoured or refused, never dropped.

Flax Linen reads the signature, hands over the keywords that are in it and drops the others.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules
from ejkernel._plugins.catalog import FUNCTIONS
from ejkernel.kernels import _xla as former

B, T, H, D = 2, 8, 8, 8
"""Sizes that fit in any order of axes."""

HONOUR = ("FlashAttention", "ScaledDotProductAttention", "flash_attention", "scaled_dot_product_attention")
CLASSES = sorted(name for name in modules.__all__ if hasattr(getattr(modules, name), "function"))
"""Class APIs."""


def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((B, T, H, D)), jnp.float32) for _ in range(3))  # pyright: ignore[reportReturnType]


def plain(query: Any, key: Any, value: Any, mask: Any) -> np.ndarray:
    logits = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", query, key) / np.sqrt(D), -jnp.inf)
    return np.asarray(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits, axis=-1), value))


def as_linen_calls(function: Any, *given: Any, **changes: Any) -> Any:
    """Flax's own list of keywords, less those that the signature lacks."""
    keywords = {
        "mask": None,
        "dropout_rng": None,
        "dropout_rate": 0.0,
        "broadcast_dropout": True,
        "deterministic": True,
        "dtype": None,
        "precision": None,
        "force_fp32_for_softmax": False,
        "qk_attn_weights_einsum": None,
        "attn_weights_value_einsum": None,
        **changes,
    }
    known = inspect.signature(function).parameters
    return function(*given, **{name: value for name, value in keywords.items() if name in known})


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_no_function_drops_a_mask(name: str):
    """Whoever runs on three arrays alone gives what the mask says, or refuses it."""
    function = getattr(ejkernel, name)
    function = function() if isinstance(function, type) else function
    causal, dropout = jnp.tril(jnp.ones((B, 1, T, T), bool)), {"dropout_rate": 0.5, "deterministic": False}
    given = arrays()
    if name in HONOUR:
        np.testing.assert_allclose(as_linen_calls(function, *given, mask=causal), plain(*given, causal), atol=1e-5)
    else:
        with pytest.raises((TypeError, ValueError)):
            as_linen_calls(function, *given, mask=causal)
    if name in ("flash_attention", "FlashAttention"):
        return
    with pytest.raises((TypeError, ValueError)):
        as_linen_calls(function, *given, dropout_rng=jax.random.key(0), broadcast_dropout=False, **dropout)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
@pytest.mark.parametrize("shape", [(B, 1, T, T), (1, H, T, T), (H, T, T), (T, T)])
def test_masks_of_flash_attention(shape: tuple[int, ...], dtype: Any):
    given, mask = arrays(), np.random.default_rng(1).random(shape) < 0.7
    mask[..., 0] = True
    call = functools.partial(as_linen_calls, functools.partial(ejkernel.flash_attention, platform="xla"))
    expected = plain(*given, mask)
    np.testing.assert_allclose(call(*given, mask=jnp.asarray(mask, dtype)), expected, atol=1e-5)
    traced = jax.jit(lambda mask: call(*given, mask=mask))
    np.testing.assert_allclose(traced(jnp.asarray(mask, dtype)), expected, atol=1e-5)
    causal = np.tri(T, dtype=bool)
    info = ejkernel.MaskInfo(dense=causal[None, None])
    both = ejkernel.flash_attention(*given, mask=jnp.asarray(mask), mask_info=info)
    np.testing.assert_allclose(both, plain(*given, mask & causal), atol=1e-5)
    np.testing.assert_allclose(
        ejkernel.flash_attention(*given, mask=jnp.asarray(mask), is_causal=True), plain(*given, mask & causal), atol=1e-5
    )


def test_dropout_of_flash_attention():
    given, key = arrays(), jax.random.key(3)
    call = functools.partial(as_linen_calls, ejkernel.flash_attention)
    active = {"dropout_rate": 0.4, "dropout_rng": key, "deterministic": False}
    with pytest.raises(ValueError, match=r"broadcast_dropout: got True, expected False .* set broadcast_dropout=False"):
        call(*given, **active)
    found = call(*given, broadcast_dropout=False, **active)
    np.testing.assert_array_equal(found, ejkernel.flash_attention(*given, dropout_prob=0.4, dropout_seed=key))
    assert float(abs(found - call(*given)).max()) > 0.1
    np.testing.assert_array_equal(call(*given, dropout_rate=0.4, dropout_rng=key), call(*given))
    with pytest.raises(ValueError, match="dropout_rng: got None, expected a PRNG key"):
        call(*given, dropout_rate=0.4, deterministic=False, broadcast_dropout=False)
    with pytest.raises(ValueError, match=r"dropout_rate: got 0\.4, expected 0.0 beside dropout_prob"):
        ejkernel.flash_attention(*given, dropout_prob=0.1, dropout_seed=1, dropout_rate=0.4, dropout_rng=key)


def test_other_keywords():
    given = arrays()
    half = as_linen_calls(ejkernel.flash_attention, *given, dtype=jnp.bfloat16, force_fp32_for_softmax=True)
    assert half.dtype == jnp.bfloat16
    refused = [
        (
            {"qk_attn_weights_einsum": jnp.einsum},
            "qk_attn_weights_einsum: got .*, expected None: flash_attention neither takes",
        ),
        ({"module": object()}, "module: got object, expected None"),
        ({"mask": jnp.full((T, T), -1e9)}, "mask: got other numbers, expected 0 for hidden and 1 for visible; .* as bias"),
        ({"mask": jnp.ones(T)}, r"mask: got shape \(8,\), expected \[B or 1"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            ejkernel.flash_attention(*given, **options)
    with pytest.raises(TypeError, match=r"mask: got True, expected nothing: its arrays are .B, H, T, D.; use flash_attention"):
        ejkernel.blocksparse_attention(*given, mask=True)
    with pytest.raises(ValueError, match="mask: got ArrayImpl, expected None: retention has no such thing; pack sequences"):
        ejkernel.retention(*given, mask=jnp.ones((T, T)))


def test_former_paths_and_explanations_know_the_keywords():
    given, causal = arrays(), jnp.tril(jnp.ones((T, T), bool))
    with pytest.warns(DeprecationWarning, match="is now ejkernel.flash_attention"):
        function = former.flash_attention
    np.testing.assert_allclose(as_linen_calls(function, *given, mask=causal), plain(*given, causal), atol=1e-5)
    assert ejkernel.explain("flash_attention", *given, mask=causal).forward.call.mask is not None


def test_in_flax_linen():
    nn = pytest.importorskip("flax.linen", reason="pip install flax")
    x = arrays()[0].reshape(B, T, -1)
    mask = nn.make_causal_mask(x[..., 0])  # of floats
    own = nn.MultiHeadDotProductAttention(num_heads=H)
    parameters = own.init(jax.random.key(0), x)
    ours = nn.MultiHeadDotProductAttention(num_heads=H, attention_fn=ejkernel.flash_attention)
    np.testing.assert_allclose(ours.apply(parameters, x, mask=mask), own.apply(parameters, x, mask=mask), atol=1e-5)
    dropping = nn.MultiHeadDotProductAttention(
        num_heads=H, attention_fn=ejkernel.flash_attention, dropout_rate=0.5, broadcast_dropout=False, deterministic=False
    )
    streams = [{"dropout": jax.random.key(seed)} for seed in (1, 2)]
    one, other = (dropping.apply(parameters, x, mask=mask, rngs=stream) for stream in streams)
    assert float(abs(one - other).max()) > 0.01
    for name in ("blocksparse_attention", "retention", "attention", "recurrent_attention"):
        module = nn.MultiHeadDotProductAttention(num_heads=H, attention_fn=getattr(ejkernel, name))
        with pytest.raises((TypeError, ValueError), match="got"):
            module.apply(parameters, x, mask=mask)
