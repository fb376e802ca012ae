"""The calls that the project promises, as a user writes them; numbers against NumPy or against each other."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import Backend, Platform, flash_attn_varlen, kernel_registry
from ejkernel.modules import FlashAttention, create_default_executor
from ejkernel.utils import varlen_input_helper

B, T, H, K, D = 2, 12, 4, 2, 16


@pytest.fixture(scope="module")
def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((B, T, H, D), (B, T, K, D), (B, T, K, D))
    return tuple(jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))


def expected(query, key, value, *, causal: bool, scale: float | None = None) -> np.ndarray:
    """Attention in NumPy float64; `[T, H, D]`, `[S, K, D]`, `[S, K, V]` or the same with a batch axis."""
    if query.ndim == 4:
        return np.stack([expected(*one, causal=causal, scale=scale) for one in zip(query, key, value, strict=True)])
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    key, value = (np.repeat(array, query.shape[1] // key.shape[1], axis=1) for array in (key, value))
    logits = np.einsum("thd,shd->hts", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        logits = np.where(np.tri(*logits.shape[1:], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), value)


def close(got, wanted) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_executor_with_dropout_and_no_seed(arrays):
    executor = create_default_executor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ejkernel.errors.EjkernelWarning)  # once per process: no seed was given
        output = executor(FlashAttention(), *arrays, causal=True, dropout_prob=0.1)
    seeded = ejkernel.flash_attention(*arrays, causal=True, dropout_prob=0.1, dropout_seed=0)
    np.testing.assert_array_equal(output, seeded)
    kept = executor(FlashAttention(), *arrays, causal=True)
    close(kept, expected(*arrays, causal=True))
    assert np.abs(np.asarray(output - kept)).max() > 0.01


def test_executor_refuses_a_class(arrays):
    with pytest.raises(TypeError, match=r"got the class FlashAttention, expected an object: FlashAttention\(\)"):
        create_default_executor()(FlashAttention, *arrays)
    with pytest.raises(TypeError, match="operation: got 'FlashAttention', expected an operation"):
        create_default_executor()("FlashAttention", *arrays)


def test_registry_gives_a_callable_held_to_a_platform(arrays):
    query, key, value = arrays
    flash = kernel_registry.get(algorithm="flash_attention", platform=Platform.XLA, backend=Backend.ANY)
    close(flash(query, key, value, causal=True), expected(*arrays, causal=True))
    with pytest.raises(ValueError, match="backend: got 'gpux', expected one of cpu, gpu, tpu, any"):
        kernel_registry.get("flash_attention", backend="gpux")


def test_register_on_two_platforms():
    @kernel_registry.register("my_kernel", Platform.XLA, Backend.ANY, priority=50)
    def my_kernel_xla(x, y):
        return x + y

    @kernel_registry.register("my_kernel", Platform.TRITON, Backend.ANY, priority=100)
    def my_kernel_triton(x, y):
        return x + y + 100

    try:
        assert kernel_registry.get("my_kernel")(1, 2) == 103
        assert kernel_registry.get("my_kernel", platform=Platform.XLA) is my_kernel_xla
        assert kernel_registry.get("my_kernel", platform="triton", backend="gpu") is my_kernel_triton
    finally:
        kernel_registry.unregister("my_kernel", Platform.XLA)
        kernel_registry.unregister("my_kernel", Platform.TRITON)


def test_register_for_another_device_is_not_chosen_here():
    other = Backend.TPU if jax.default_backend() != "tpu" else Backend.GPU
    kernel_registry.register("my_kernel", Platform.XLA, Backend.ANY, priority=1)(lambda x, y: x + y)
    kernel_registry.register("my_kernel", Platform.PALLAS, other, priority=100)(lambda x, y: x * y)
    try:
        assert kernel_registry.get("my_kernel")(3, 4) == 7
        assert kernel_registry.get("my_kernel", backend=other)(3, 4) == 12
    finally:
        kernel_registry.unregister("my_kernel", Platform.XLA)
        kernel_registry.unregister("my_kernel", Platform.PALLAS)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_varlen_is_each_sequence_by_itself(equal, scale):
    q, k, v, packing = varlen_input_helper(
        batch_size=3, qheads=4, kvheads=2, qseqlen=30, kseqlen=30, head_dim=16, dtype=jnp.float32, equal_seqlens=equal
    )
    out = flash_attn_varlen(
        q,
        k,
        v,
        cu_seqlens_q=packing.cu_seqlens_q,
        cu_seqlens_k=packing.cu_seqlens_k,
        max_seqlens_q=packing.max_seqlens_q,
        max_seqlens_k=packing.max_seqlens_k,
        causal=True,
        layout=packing.layout,
        sm_scale=packing.sm_scale if scale is None else scale,
    )
    edges = list(zip(np.asarray(packing.cu_seqlens_q), np.asarray(packing.cu_seqlens_k), strict=True))
    assert len(edges) == 4
    for (q0, k0), (q1, k1) in itertools.pairwise(edges):
        rows = expected(q[q0:q1], k[k0:k1], v[k0:k1], causal=True, scale=scale)
        close(out[q0:q1], rows)


MISTAKES = {
    "a string": (lambda q, k, v: ejkernel.rms_norm(q, "scale"), TypeError, "scale: got str, expected an array"),
    "an array as mask_info": (
        lambda q, k, v: ejkernel.flash_attention(q, k, v, mask_info=q),
        TypeError,
        "mask_info: got an array",
    ),
    "a number as platform": (lambda q, k, v: ejkernel.softmax(q, platform=3), TypeError, "platform: got 3, expected the name"),
    "a block of 0": (
        lambda q, k, v: ejkernel.flash_attention(q, k, v, cfg={"block_q": 0}),
        ValueError,
        "block_q: got 0, expected a value >= 1",
    ),
    "a scalar": (
        lambda q, k, v: ejkernel.rms_norm(q[0, 0, 0, 0]),
        ValueError,
        r"x: got shape \(\), expected at least one axis",
    ),
    "a float as axis": (lambda q, k, v: ejkernel.softmax(q, axis=1.0), TypeError, "axis: got 1.0, expected an int"),
    "packed batches": (
        lambda q, k, v: ejkernel.flash_attention(q, k, v, cum_seqlens_q=jnp.array([0, T])),
        ValueError,
        "query: got batch size 2, expected 1 with packed sequences",
    ),
    "other numbers of sequences": (
        lambda q, k, v: flash_attn_varlen(q[0], k[0], v[0], jnp.array([0, 4, T]), jnp.array([0, T])),
        ValueError,
        "cu_seqlens_k: got cumulative lengths of 1 sequences, expected those of 2, as in cu_seqlens_q",
    ),
    "a dtype that is none": (
        lambda q, k, v: ejkernel.grouped_matmul(q[0, 0], k[0, :1, 0, :, None], jnp.array([4]), preferred_element_type="int9"),
        TypeError,
        "preferred_element_type: got 'int9'",
    ),
    "a bias as init_bias": (lambda q, k, v: ejkernel.attention(q, k, v, init_bias=3), TypeError, "init_bias: got 3"),
    "explain of a function that is not public": (
        lambda q, k, v: ejkernel.explain(jnp.exp, q),
        TypeError,
        "expected a public function or its name",
    ),
    "explain of a composition": (
        lambda q, k, v: ejkernel.explain("all_gather_matmul", q, k, "tp"),
        ValueError,
        "expected the name of a public function that platforms implement; that one is the same on every platform",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_argument_got_and_expected(name, arrays):
    call, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        call(*arrays)


def test_rms_norm_gradients_are_exact_also_when_vmap_shares_the_scale():
    """`d/dx sum(g y)` is `r (w - n mean(w n))` with n = r x, w = g scale; a shared scale's gradient is a sum, not a mean."""
    keys = jax.random.split(jax.random.key(1), 3)
    x, g = (jax.random.normal(key, (5, 3, 8)) for key in keys[:2])
    scale = jax.random.normal(keys[2], (8,))

    def loss(x, scale):
        out = jax.vmap(jax.vmap(ejkernel.rms_norm, in_axes=(0, None)), in_axes=(0, None))(x, scale)
        return jnp.sum(out * g)

    d_x, d_scale = jax.grad(loss, argnums=(0, 1))(x, scale)
    x, g, scale = (np.asarray(array, np.float64) for array in (x, g, scale))
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    n, w = r * x, g * scale
    close(d_x, r * (w - n * (w * n).mean(-1, keepdims=True)))
    close(d_scale, (g * n).sum((0, 1)))
    one = jax.vmap(jax.grad(lambda x, scale, g: jnp.sum(ejkernel.rms_norm(x, scale) * g), argnums=1), in_axes=(0, None, 0))
    close(one(jnp.float32(x), jnp.float32(scale), jnp.float32(g)), (g * n).sum(1))
