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
    if name in HONOUR:
        return
    with pytest.raises((TypeError, ValueError)):
        as_linen_calls(function, *given, dropout_rng=jax.random.key(0), broadcast_dropout=False, **dropout)


FUNCTIONS_OF_FLAX = ("flash_attention", "scaled_dot_product_attention")
"""Functions that can stand in the place of Flax's."""


@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(B, 1, T, T), (1, H, T, T), (H, T, T), (T, T)])
def test_masks(shape: tuple[int, ...], dtype: Any, name: str):
    function, given = getattr(ejkernel, name), arrays()
    mask = np.random.default_rng(1).random(shape) < 0.7
    mask[..., 0] = True
    call = functools.partial(as_linen_calls, functools.partial(function, platform="xla"))
    expected = plain(*given, mask)
    np.testing.assert_allclose(call(*given, mask=jnp.asarray(mask, dtype)), expected, atol=1e-5)
    traced = jax.jit(lambda mask: call(*given, mask=mask))
    np.testing.assert_allclose(traced(jnp.asarray(mask, dtype)), expected, atol=1e-5)
    causal = np.tri(T, dtype=bool)
    info = ejkernel.MaskInfo(dense=causal[None, None])
    both = function(*given, mask=jnp.asarray(mask), mask_info=info)
    np.testing.assert_allclose(both, plain(*given, mask & causal), atol=1e-5)
    np.testing.assert_allclose(
        function(*given, mask=jnp.asarray(mask, dtype), is_causal=True), plain(*given, mask & causal), atol=1e-5
    )


@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
def test_dropout(name: str):
    function, given, key = getattr(ejkernel, name), arrays(), jax.random.key(3)
    call = functools.partial(as_linen_calls, function)
    active = {"dropout_rate": 0.4, "dropout_rng": key, "deterministic": False}
    found = call(*given, broadcast_dropout=False, **active)
    np.testing.assert_array_equal(found, function(*given, dropout_prob=0.4, dropout_seed=key))
    assert float(abs(found - call(*given)).max()) > 0.1
    np.testing.assert_array_equal(call(*given, dropout_rate=0.4, dropout_rng=key), call(*given))
    with pytest.raises(ValueError, match="dropout_rng: got None, expected a PRNG key"):
        call(*given, dropout_rate=0.4, deterministic=False, broadcast_dropout=False)
    with pytest.raises(ValueError, match=r"dropout_rate: got 0\.4, expected 0.0 beside dropout_prob"):
        function(*given, dropout_prob=0.1, dropout_seed=1, dropout_rate=0.4, dropout_rng=key)


@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
def test_dropout_of_the_same_entries(name: str):
    """`broadcast_dropout`, as Flax has it unless told otherwise: one keep mask for all rows and heads."""
    query, key, _ = arrays()
    value = jnp.broadcast_to(jnp.eye(T)[None, :, None], (B, T, H, T))  # makes the weights the results
    function = getattr(ejkernel, name)
    active = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3), "deterministic": False}
    kept = as_linen_calls(function, query, key, value, **active) != 0  # [B, T, H, S]
    assert bool((kept == kept[:1, :, :1]).all())
    assert 0.3 < float(kept[0, :, 0].mean()) < 0.7
    alone = as_linen_calls(function, query, key, value, broadcast_dropout=False, **active) != 0
    assert not bool((alone == alone[:1, :, :1]).all())
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bths", query, key) / np.sqrt(D), axis=-1)
    found = as_linen_calls(function, query, key, value, **active)
    np.testing.assert_allclose(found, jnp.where(kept, 2 * weights, 0), atol=1e-5)
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    specs = jax.sharding.PartitionSpec("data", None, "model")
    options = {"dropout_prob": 0.5, "dropout_seed": jax.random.key(3), "broadcast_dropout": True}
    over = function(query, key, value, mesh=mesh, in_specs=(specs,) * 3, out_specs=specs, **options)
    np.testing.assert_allclose(over, found, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
@pytest.mark.parametrize("by_name", [0, 1, 3])
def test_dtype(name: str, by_name: int):
    """It holds whether the arrays are given by position or by name, and junk is refused either way."""
    function, given = getattr(ejkernel, name), dict(zip(("query", "key", "value"), arrays(), strict=True))
    named = dict(list(given.items())[3 - by_name :])
    call = functools.partial(function, *list(given.values())[: 3 - by_name], **named)
    wanted = function(*(array.astype(jnp.float16) for array in given.values()))
    found = call(dtype=jnp.float16)
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, wanted)
    for wrong in ("xx", np.int32, jnp.float8_e4m3fn, object()):
        with pytest.raises(TypeError, match=r"dtype: got .*, expected float32, bfloat16 or float16"):
            call(dtype=wrong)


@pytest.mark.parametrize("name", ["retention", "ring_attention"])
def test_a_dtype_that_changes_nothing(name: str):
    function, given = getattr(ejkernel, name), dict(zip(("query", "key", "value"), arrays(), strict=True))
    np.testing.assert_array_equal(function(**given, dtype=jnp.float32), function(*given.values(), dtype="float32"))
    for call in (functools.partial(function, **given), functools.partial(function, *given.values())):
        with pytest.raises(ValueError, match=f"dtype: got .*, expected None: {name} has no such thing"):
            call(dtype=jnp.float16)
        with pytest.raises(TypeError, match="deterministic: got 'no', expected True or False"):
            call(deterministic="no")


@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
def test_other_keywords(name: str):
    function, given = getattr(ejkernel, name), arrays()
    half = as_linen_calls(function, *given, dtype=jnp.bfloat16, force_fp32_for_softmax=True)
    assert half.dtype == jnp.bfloat16
    refused = [
        ({"qk_attn_weights_einsum": jnp.einsum}, f"qk_attn_weights_einsum: got .*, expected None: {name} neither takes"),
        ({"module": object()}, "module: got object, expected None"),
        ({"mask": jnp.full((T, T), -1e9)}, "mask: got other numbers, expected 0 for hidden and 1 for visible; .* as bias"),
        ({"mask": jnp.full((T, T), 2)}, "mask: got other numbers, expected 0 for hidden and 1 for visible"),
        ({"mask": jnp.ones(T)}, r"mask: got shape \(8,\), expected \[B or 1"),
        ({"dropout_rate": 1.5}, r"dropout_rate: got 1\.5, expected a value in \[0, 1\)"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            function(*given, **options)
    for options in ({"deterministic": 1}, {"broadcast_dropout": "x"}, {"is_causal": None, "force_fp32_for_softmax": 2}):
        with pytest.raises(TypeError, match=r"expected True or False"):
            function(*given, **options)
    with pytest.raises(TypeError, match=r"dropout_rng: got .*, expected an int, an integer scalar or a jax PRNG key"):
        function(*given, dropout_rng=object())


@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
@pytest.mark.parametrize("leading", [(), (2, 3), (1, 2, 1)])
def test_any_number_of_rows(name: str, leading: tuple[int, ...]):
    """Flax's arrays have any number of axes before the length."""
    rng = np.random.default_rng(2)
    given = [jnp.asarray(rng.standard_normal((*leading, T, H, D)), jnp.float32) for _ in range(3)]
    logits = jnp.einsum("...thd,...shd->...hts", *given[:2]) / np.sqrt(D)
    ones = (1,) * len(leading)
    for shape in (
        (T, T),
        (1, T, T),
        (*leading, 1, T, T),
        (*leading, H, T, T),
        (*ones, H, T, T),
        (*leading[:1], *ones[1:], 1, T, T),
    ):
        mask = rng.random(shape) < 0.7
        mask[..., 0] = True
        weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        found = as_linen_calls(getattr(ejkernel, name), *given, mask=jnp.asarray(mask))
        np.testing.assert_allclose(found, jnp.einsum("...hts,...shd->...thd", weights, given[2]), atol=1e-5)
    with pytest.raises(ValueError, match="mask: got shape"):
        as_linen_calls(getattr(ejkernel, name), *given, mask=jnp.ones((7, *leading, 1, T, T), bool))


def test_functions_that_are_none():
    given = arrays()
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


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": jnp.bfloat16},
    "precision": {"precision": "highest"},
}
"""Options of Flax's layers."""


def in_flax(library: str, function: Any, shape: tuple[int, ...], case: str, **options: Any) -> Any:
    """Results of a layer of Flax with an attention function, or with its own for None."""
    own = {} if function is None else {"attention_fn": function}
    x, other = (jax.random.normal(jax.random.key(seed), shape) for seed in (0, 1))
    masks = {"mask": pytest.importorskip("flax.linen").make_causal_mask(x[..., 0])} if case == "masked" else {}
    inputs = (x, other[..., :5, :]) if case == "cross" else (x,)
    if library == "nnx":
        nnx = pytest.importorskip("flax.nnx", reason="pip install flax")
        made = {"num_heads": 4, "in_features": 32, "decode": case == "decode", "rngs": nnx.Rngs(0), **options, **own}
        layer = nnx.MultiHeadAttention(**made)
        if case != "decode":
            return layer(*inputs, **masks)
        layer.init_cache(shape)
        return jnp.concatenate([layer(x[..., i : i + 1, :]) for i in range(shape[-2])], axis=-2)
    linen = pytest.importorskip("flax.linen", reason="pip install flax")
    layer = linen.MultiHeadDotProductAttention(num_heads=4, decode=case == "decode", **options, **own)
    variables = layer.init(jax.random.key(2), *inputs)
    if case != "decode":
        return layer.apply(variables, *inputs, **masks)
    found = []
    for i in range(shape[-2]):
        out, changed = layer.apply(variables, x[..., i : i + 1, :], mutable=["cache"])
        variables = {**variables, **changed}
        found.append(out)
    return jnp.concatenate(found, axis=-2)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("case", ["self", "cross", "masked", "decode"])
@pytest.mark.parametrize("shape", [(2, 7, 32), (7, 32), (2, 3, 7, 32)], ids=str)
@pytest.mark.parametrize("library", ["nnx", "linen"])
@pytest.mark.parametrize("name", [*FUNCTIONS_OF_FLAX, "FlashAttention", "ScaledDotProductAttention"])
def test_layers_of_flax(name: str, library: str, shape: tuple[int, ...], case: str, layer: str):
    if case == "decode" and layer == "bfloat16":
        pytest.skip("Flax's cache of an NNX layer is float32; it would need a cache in the layer's dtype")
    function = getattr(ejkernel, name)
    function = function() if isinstance(function, type) else function
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as Flax's code needs them
        found, own = (in_flax(library, one, shape, case, **LAYERS[layer]) for one in (function, None))
    assert found.dtype == own.dtype
    np.testing.assert_allclose(found.astype(jnp.float32), own.astype(jnp.float32), atol=3e-2 if layer == "bfloat16" else 2e-5)


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS_OF_FLAX)
def test_dropout_and_weights_in_flax(name: str, broadcast: bool):
    nnx = pytest.importorskip("flax.nnx", reason="pip install flax")
    x = jax.random.normal(jax.random.key(0), (2, 7, 32))
    made = {"num_heads": 4, "in_features": 32, "decode": False, "rngs": nnx.Rngs(0)}
    layer = nnx.MultiHeadAttention(**made, dropout_rate=0.5, broadcast_dropout=broadcast, attention_fn=getattr(ejkernel, name))
    one, other = (layer(x, deterministic=False) for _ in range(2))
    assert float(abs(one - other).max()) > 0.01
    np.testing.assert_array_equal(layer(x, deterministic=True), layer(x, deterministic=True))
    with pytest.raises(ValueError, match=f"module: got MultiHeadAttention, expected None: {name} neither takes products"):
        layer(x, deterministic=True, sow_weights=True)


@pytest.mark.parametrize("attend", FUNCTIONS_OF_FLAX)
def test_in_flax_linen(attend: str):
    nn = pytest.importorskip("flax.linen", reason="pip install flax")
    function = getattr(ejkernel, attend)
    x = arrays()[0].reshape(B, T, -1)
    mask = nn.make_causal_mask(x[..., 0])  # of floats
    own = nn.MultiHeadDotProductAttention(num_heads=H)
    parameters = own.init(jax.random.key(0), x)
    ours = nn.MultiHeadDotProductAttention(num_heads=H, attention_fn=function)
    np.testing.assert_allclose(ours.apply(parameters, x, mask=mask), own.apply(parameters, x, mask=mask), atol=1e-5)
    dropping = nn.MultiHeadDotProductAttention(
        num_heads=H, attention_fn=function, dropout_rate=0.5, broadcast_dropout=False, deterministic=False
    )
    streams = [{"dropout": jax.random.key(seed)} for seed in (1, 2)]
    one, other = (dropping.apply(parameters, x, mask=mask, rngs=stream) for stream in streams)
    assert float(abs(one - other).max()) > 0.01
    for name in ("blocksparse_attention", "retention", "attention", "recurrent_attention"):
        module = nn.MultiHeadDotProductAttention(num_heads=H, attention_fn=getattr(ejkernel, name))
        with pytest.raises((TypeError, ValueError), match="got"):
            module.apply(parameters, x, mask=mask)
