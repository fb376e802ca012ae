"""The public attention functions, run on the XLA platform and compared with the float64 reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel import MaskInfo, modules
from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs

flash_attention = functools.partial(ejkernel.flash_attention, platform="xla")
flash_attn_varlen = functools.partial(ejkernel.flash_attn_varlen, platform="xla")
sdpa = functools.partial(ejkernel.scaled_dot_product_attention, platform="xla")
attention = functools.partial(ejkernel.attention, platform="xla")

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv(queries=12, keys=None, heads=4, key_heads=2, batch=2, size=8, value_size=None):
    keys = queries if keys is None else keys
    return (
        normal(batch, queries, heads, size),
        normal(batch, keys, key_heads, size, seed=1),
        normal(batch, keys, key_heads, value_size or size, seed=2),
    )


def exact(query, key, value, *, grad=None, **rest):
    """Reference outputs, and gradients for the cotangent `grad`."""
    bound = OPERATION.canonicalise(query, key, value, **rest)
    as_numpy = jax.tree.map(lambda a: np.asarray(a, np.float64) if a.dtype.kind == "f" else np.asarray(a), bound.inputs)
    outputs = reference.forward(bound.call, as_numpy)
    if grad is None:
        return outputs
    return outputs, reference.backward(bound.call, as_numpy, outputs, FlashAttentionOutputs(np.asarray(grad, np.float64)))


# flash_attention


def test_flash_attention_output_lse_and_gradients():
    q, k, v = qkv(15, 20, value_size=5)
    bias, sinks, grad = normal(1, 4, 15, 20), normal(4, 2), normal(2, 15, 4, 5, seed=9)
    options = {"causal": True, "causal_alignment": "bottom_right", "logits_soft_cap": 4.0, "sliding_window": [9, 0]}
    outputs, gradients = exact(q, k, v, bias=bias, softmax_aux=sinks, grad=grad, **options)

    def run(q, k, v, bias, sinks):
        return flash_attention(q, k, v, bias=bias, softmax_aux=sinks, return_lse=True, **options)

    (out, lse), pull = jax.vjp(run, q, k, v, bias, sinks)
    np.testing.assert_allclose(out, outputs.out, **CLOSE)
    np.testing.assert_allclose(lse, outputs.lse, **CLOSE)
    got = pull((jnp.asarray(grad), jnp.zeros_like(lse)))
    wanted = (gradients.query, gradients.key, gradients.value, gradients.bias, gradients.softmax_aux[0])
    for name, one, other in zip(("query", "key", "value", "bias", "softmax_aux"), got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5, err_msg=name)


def test_mask_info_bias_and_causal_hold_together():
    q, k, v = qkv(10)
    ids = np.array([[0] * 4 + [1] * 4 + [-1] * 2] * 2, np.int32)
    info = MaskInfo(dense=normal(2, 1, 10, 10) > -0.5, query_segments=ids, key_segments=ids)
    bias = normal(2, 1, 1, 10)
    seen = (
        info.dense
        & (ids[:, None, :, None] == ids[:, None, None])
        & (ids >= 0)[:, None, :, None]
        & np.tril(np.ones((1, 1, 10, 10), bool))
    )
    expected = exact(q, k, v, bias=bias, mask=seen).out
    np.testing.assert_allclose(flash_attention(q, k, v, bias=bias, mask_info=info, causal=True), expected, **CLOSE)
    assert (np.asarray(expected)[:, 8:] == 0).all()


def test_dropout_by_int_key_and_scalar():
    q, k, v = qkv()
    run = functools.partial(flash_attention, q, k, v, dropout_prob=0.4)
    expected = exact(q, k, v, dropout_prob=0.4, dropout_seed=5).out
    for seed in (5, np.uint32(5), jnp.uint32(5), np.array([5, 0], np.uint32)):
        np.testing.assert_allclose(run(dropout_seed=seed), expected, **CLOSE)
    assert abs(run(dropout_seed=6) - expected).max() > 0.1
    key = jax.random.key(3)
    np.testing.assert_array_equal(run(dropout_seed=key), run(dropout_seed=jax.random.key_data(key)))


def test_another_seed_is_no_other_program():
    q, k, v = qkv(7, heads=2)
    flash_attention(q, k, v, dropout_prob=0.4, dropout_seed=1)
    with jax.log_compiles(False), count_compilations() as compiled:
        flash_attention(q, k, v, dropout_prob=0.4, dropout_seed=2)
    assert compiled == []


class count_compilations:  # noqa: N801 - reads as a verb
    """Collects the names of JAX's compilation events inside the block."""

    def __enter__(self):
        self.names = []
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self.names

    def _note(self, name, duration, **_):
        if "backend_compile" in name:
            self.names.append(name)

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._note)


def test_low_precision_keeps_its_dtype():
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in qkv())
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    expected = exact(*(np.asarray(a, np.float32) for a in (q, k, v)), causal=True).out
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2e-2, atol=2e-2)


def test_block_tables_are_refused():
    with pytest.raises(ValueError, match=r"block_tables: got a page table, expected None; .* unified_attention takes pages"):
        flash_attention(*qkv(), block_tables=np.zeros((2, 2), np.int32))


@pytest.mark.parametrize(("change", "text"), [
    ({"query": [1.0]}, "query: got list, expected an array"),
    ({"sliding_window": -2}, "sliding_window: got -2"),
    ({"causal_alignment": "bottom_right"}, "causal_alignment: got 'bottom_right', expected None without causal=True"),
    ({"cum_seqlens_k": np.array([0, 12])}, "cum_seqlens_q: got None"),
    ({"in_specs": (P(),)}, "in_specs: got "),
])  # fmt: skip
def test_facade_errors(change, text):
    q, k, v = qkv(batch=1)
    with pytest.raises((ValueError, TypeError)) as caught:
        flash_attention(**{"query": q, "key": k, "value": v, **change})
    assert str(caught.value).startswith(text)


# Packed sequences


def packed_problem(lengths_q, lengths_k, tail=0, value_size=6):
    q, k = normal(sum(lengths_q) + tail, 4, 8), normal(sum(lengths_k) + tail, 2, 8, seed=1)
    v = normal(sum(lengths_k) + tail, 2, value_size, seed=2)
    cu = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k)]
    return q, k, v, *cu


def one_by_one(q, k, v, cu_q, cu_k, **options):
    """Every sequence on its own, zeros past the last."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for r in range(len(cu_q) - 1):
        rows, columns = slice(cu_q[r], cu_q[r + 1]), slice(cu_k[r], cu_k[r + 1])
        outputs = exact(q[None, rows], k[None, columns], v[None, columns], **options)
        out[rows], lse[rows] = outputs.out[0], outputs.lse[0]
    return out, lse


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "causal_alignment": "bottom_right"},
    {"causal": True, "sliding_window": 3},
    {"chunk_size": 4},
    {"causal": True, "chunk_size": 3, "logits_soft_cap": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [([5, 1, 9], [5, 1, 9]), ([3, 0, 8, 2], [7, 4, 5, 0])], ids=["same", "cross"])
def test_packed_equals_one_by_one(lengths, options):
    q, k, v, cu_q, cu_k = packed_problem(*lengths, tail=3)
    expected, expected_lse = one_by_one(q, k, v, cu_q, cu_k, **options)
    out, lse = flash_attn_varlen(q, k, v, cu_q, cu_k, max(lengths[0]), max(lengths[1]), return_lse=True, **options)
    np.testing.assert_allclose(out, expected, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    assert (np.asarray(out)[cu_q[-1] :] == 0).all()


def test_the_same_lengths_given_once_or_twice():
    q, k, v, cu, _ = packed_problem([5, 1, 9], [5, 1, 9], tail=2)
    expected, _ = one_by_one(q, k, v, cu, cu, causal=True)
    for given in ((cu,), (cu, cu), (cu, cu.copy()), (jnp.asarray(cu), None)):
        np.testing.assert_allclose(flash_attn_varlen(q, k, v, *given, causal=True), expected, **CLOSE)


def test_packed_under_jit_and_grad():
    q, k, v, cu_q, cu_k = packed_problem([3, 8, 2], [7, 4, 5])
    grad = normal(13, 4, 6, seed=3)

    @jax.jit
    def gradients(q, k, v, cu_q, cu_k):
        def loss(*a):
            return (flash_attn_varlen(*a, cu_q, cu_k, 8, 7, causal=True, causal_alignment="bottom_right") * grad).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    expected = [np.zeros(a.shape) for a in (q, k, v)]
    for r in range(3):
        rows, columns = slice(cu_q[r], cu_q[r + 1]), slice(cu_k[r], cu_k[r + 1])
        _, found = exact(
            q[None, rows],
            k[None, columns],
            v[None, columns],
            grad=grad[None, rows],
            causal=True,
            causal_alignment="bottom_right",
        )
        for total, name, part in zip(expected, ("query", "key", "value"), (rows, columns, columns), strict=True):
            total[part] = getattr(found, name)[0]
    for got, wanted in zip(gradients(q, k, v, cu_q, cu_k), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-5)


def test_traced_lengths_need_one_compilation():
    q, k, v, cu, _ = packed_problem([6, 9], [6, 9])
    run = jax.jit(lambda cu: flash_attn_varlen(q, k, v, cu, causal=True))
    run(cu)
    other = np.array([0, 2, 11], np.int32)
    with count_compilations() as compiled:
        out = run(other)
    assert compiled == []
    expected, _ = one_by_one(q, k, v, other, other, causal=True)
    np.testing.assert_allclose(out, expected, **CLOSE)


@pytest.mark.parametrize("layout", ["thd", "htd", "bthd", "bhtd"])
def test_layouts(layout):
    q, k, v, cu, _ = packed_problem([5, 8], [5, 8])
    expected, expected_lse = one_by_one(q, k, v, cu, cu, causal=True)

    def arrange(array):
        array = array.swapaxes(0, 1) if "ht" in layout else array
        return array[None] if "b" in layout else array

    out, lse = flash_attn_varlen(*map(arrange, (q, k, v)), cu, cu, causal=True, layout=layout, return_lse=True)
    np.testing.assert_allclose(out, arrange(expected), **CLOSE)
    np.testing.assert_allclose(lse[..., None], arrange(expected_lse[..., None]), **CLOSE)


@pytest.mark.parametrize("axes", [3, 4])
def test_flash_attention_takes_packed_sequences(axes):
    q, k, v, cu_q, cu_k = packed_problem([3, 8], [7, 4], tail=1)
    sinks = normal(4)
    expected, _ = one_by_one(q, k, v, cu_q, cu_k, softmax_aux=sinks, causal=True)
    expected = expected if axes == 3 else expected[None]
    inputs = (q, k, v) if axes == 3 else (q[None], k[None], v[None])
    out = np.asarray(flash_attention(*inputs, cum_seqlens_q=cu_q, cum_seqlens_k=cu_k, softmax_aux=sinks, causal=True))
    np.testing.assert_allclose(out, expected, **CLOSE)


def test_packed_with_a_dense_mask_and_bias():
    q, k, v, cu, _ = packed_problem([5, 8], [5, 8])
    dense, bias = normal(13, 13, seed=4) > -0.3, normal(13, 13, seed=5)
    out = flash_attention(q, k, v, bias=bias, cum_seqlens_q=cu, mask_info=MaskInfo(dense=dense[None, None], causal=True))
    blocks = np.zeros((13, 13), bool)
    blocks[:5, :5] = blocks[5:, 5:] = True
    expected = exact(q[None], k[None], v[None], bias=bias, mask=dense & blocks, causal=True).out[0]
    np.testing.assert_allclose(out, expected, **CLOSE)


REFUSED = [
    ({"cu_seqlens_q": np.array([1, 13])}, "cu_seqlens_q: got 1 as its first entry, expected 0"),
    ({"cu_seqlens_q": np.array([0, 9, 5])}, "cu_seqlens_q: got [0, 9, 5], which decreases"),
    ({"cu_seqlens_q": np.array([0, 5, 14])}, "cu_seqlens_q: got 14 as its last entry, expected at most the 13 packed tokens"),
    ({"cu_seqlens_k": np.array([0, 5, 14])}, "cu_seqlens_k: got 14 as its last entry"),
    ({"cu_seqlens_q": np.array([0.0, 5.0])}, "cu_seqlens_q: got dtype float64, expected an integer type"),
    ({"cu_seqlens_q": np.array([[0, 13]])}, "cu_seqlens_q: got shape (1, 2), expected [R + 1]"),
    ({"cu_seqlens_q": [0, 13]}, "cu_seqlens_q: got list"),
    ({"cu_seqlens_k": np.array([0, 5, 9, 13])}, "cu_seqlens_k: got cumulative lengths of 3 sequences"),
    ({"max_seqlens_q": 7}, "max_seqlens_q: got 7, expected at least 8, the longest sequence in cu_seqlens_q"),
    ({"max_seqlens_k": -1}, "max_seqlens_k: got -1"),
    ({"layout": "dht"}, "layout: got 'dht', expected one of thd, htd, bthd, bhtd"),
    ({"layout": "bthd"}, "query: got shape (13, 4, 8), expected 4 axes in layout 'bthd'"),
    ({"causal_alignment": "bottom_right"}, "causal_alignment: got 'bottom_right'"),
    ({"mask_info": MaskInfo(key_lengths=np.array([4]))}, "mask_info: got key_lengths beside cum_seqlens"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text.split(",")[0] for _, text in REFUSED])
def test_packed_refusals(change, text):
    q, k, v, cu, _ = packed_problem([5, 8], [5, 8])
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu.copy()}
    with pytest.raises((ValueError, TypeError)) as caught:
        flash_attn_varlen(**{**arguments, **change})
    assert str(caught.value).startswith(text)


# scaled_dot_product_attention


@pytest.mark.parametrize("options", [
    {},
    {"is_causal": True, "scale": 0.3},
    {"local_window_size": (2, 1)},
    {"local_window_size": 3, "is_causal": True},
    {"query_seq_lengths": np.array([9, 4], np.int32), "key_value_seq_lengths": np.array([7, 14], np.int32)},
    {"mask": normal(2, 1, 12, 14) > -0.5, "bias": normal(1, 4, 12, 14)},
    {"mask": normal(4, 12, 14) > -0.5},
    {"bias": normal(4, 12, 14), "mask": normal(1, 12, 14) > -0.5},
    {"implementation": "xla", "is_causal": True},
], ids=lambda options: "-".join(options) or "plain")  # fmt: skip
def test_sdpa_agrees_with_jax_nn(options):
    q, k, v = qkv(12, 14)
    expected = jax.nn.dot_product_attention(q, k, v, **options)
    if "implementation" not in options:
        options = {**options, "platform": "xla"}
    if "query_seq_lengths" in options:
        past = np.arange(12)[None, :, None, None] >= options["query_seq_lengths"][:, None, None, None]
        expected = np.where(past, 0, expected)
    np.testing.assert_allclose(ejkernel.scaled_dot_product_attention(q, k, v, **options), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [True, False])
def test_sdpa_returns_the_residual_of_jax_nn(batch):
    q, k, v = qkv(12, 14) if batch else (a[0] for a in qkv(12, 14))
    options = {"mask": normal(4, 12, 14) > -0.5, "bias": normal(1, 12, 14), "scale": 0.4, "return_residual": True}
    out, residual = sdpa(q, k, v, **options)
    expected = jax.nn.dot_product_attention(q, k, v, **options)
    assert residual.shape == out.shape[:-1] and residual.dtype == jnp.float32
    for one, other in zip((out, residual), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_sdpa_refuses_words_that_do_not_fit():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="implementation: got 'flash', expected one of xla, cudnn, or None"):
        sdpa(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match="platform: got 'triton', expected None beside implementation"):
        ejkernel.scaled_dot_product_attention(q, k, v, implementation="xla", platform="triton")
    with pytest.raises(ejkernel.NoKernelError, match="cudnn"):
        ejkernel.scaled_dot_product_attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match=r"bias: got shape \(1, 3, 12, 12\), expected \[B or 1"):
        sdpa(q, k, v, bias=np.zeros((3, 12, 12), np.float32))
    made = sdpa(q, k, v, init_bias=lambda: jnp.ones((4, 12, 12)))
    np.testing.assert_array_equal(made, sdpa(q, k, v, bias=jnp.ones((4, 12, 12))))


def test_sdpa_without_batch_and_with_both_names():
    q, k, v = (a[0] for a in qkv())
    expected = exact(q[None], k[None], v[None], causal=True, softmax_scale=0.5, sliding_window=4).out[0]
    np.testing.assert_allclose(sdpa(q, k, v, is_causal=True, scale=0.5, local_window_size=4), expected, **CLOSE)
    np.testing.assert_allclose(sdpa(q, k, v, causal=True, softmax_scale=0.5, sliding_window=4), expected, **CLOSE)
    with pytest.raises(ValueError, match=r"softmax_scale: got 0.5, expected None, or scale = 0.25"):
        sdpa(q, k, v, scale=0.25, softmax_scale=0.5)


def test_sdpa_takes_packed_sequences():
    q, k, v, cu_q, cu_k = packed_problem([3, 8], [7, 4])
    expected, _ = one_by_one(q, k, v, cu_q, cu_k, causal=True)
    np.testing.assert_allclose(sdpa(q, k, v, cum_seqlens_q=cu_q, cum_seqlens_k=cu_k, causal=True), expected, **CLOSE)
    with pytest.raises(ValueError, match="packed sequences beside a mask or lengths"):
        sdpa(q, k, v, cum_seqlens_q=cu_q, cum_seqlens_k=cu_k, mask=np.ones((1, 1), bool))


def test_a_mask_in_the_place_of_lengths_is_refused():
    refused = pytest.raises(TypeError, match=r"cum_seqlens_q: got dtype bool, .* masks are passed by keyword")
    with pytest.warns(DeprecationWarning, match="pass cum_seqlens_q= by name"), refused:
        sdpa(*qkv(), None, np.ones((1, 1, 12, 12), bool))


# attention


def dense_weights(q, k, *, bias=0.0, seen=True, cap=None, sinks=None, scale=None):
    """Plain softmax weights, `[B, H, T, S]`, differentiable by JAX."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * scale + bias
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    logits = jnp.where(seen, logits, -1e30)
    if sinks is not None:
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))], -1)
    return jnp.where(seen, jax.nn.softmax(logits, -1)[..., : k.shape[1]], 0)


def test_attention_weights_and_output():
    q, k, v = qkv(9, 11, value_size=5)
    bias, sinks = normal(1, 4, 9, 11), normal(4)
    out, weights = attention(q, k, v, bias=bias, softmax_aux=sinks, causal=True, logits_soft_cap=3.0)
    expected = dense_weights(q, k, bias=bias, seen=np.tril(np.ones((9, 11), bool)), cap=3.0, sinks=sinks)
    np.testing.assert_allclose(weights, expected, **CLOSE)
    np.testing.assert_allclose(out, exact(q, k, v, bias=bias, softmax_aux=sinks, causal=True, logits_soft_cap=3.0).out, **CLOSE)
    assert (np.asarray(weights).sum(-1) < 0.999).all()


def test_attention_weights_are_differentiable():
    q, k, v = qkv(9, 11)
    bias, sinks, seen = normal(1, 4, 9, 11), normal(4), normal(2, 1, 9, 11, seed=5) > 0
    seen[0, 0, 3] = False
    grad = normal(2, 4, 9, 11, seed=6)

    def loss(weights_of):
        return lambda q, k, bias, sinks: (weights_of(q, k, bias, sinks) * grad).sum()

    got = loss(lambda q, k, bias, sinks: attention(q, k, v, bias=bias, softmax_aux=sinks, mask_info=MaskInfo(dense=seen))[1])
    wanted = loss(lambda q, k, bias, sinks: dense_weights(q, k, bias=bias, seen=seen, sinks=sinks))
    arguments = (q, k, bias, sinks)
    for one, other in zip(*(jax.jit(jax.grad(f, (0, 1, 2, 3)))(*arguments) for f in (got, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_attention_with_infinite_bias_and_nan_under_the_mask():
    q, k, v = qkv(6, heads=2)
    bias = np.zeros((1, 1, 6, 6), np.float32)
    bias[..., 2, :] = -np.inf
    seen = np.ones((1, 1, 6, 6), bool)
    seen[..., 4] = False
    bias[..., 4] = np.nan
    weights, pull = jax.vjp(lambda q, bias: attention(q, k, v, bias=bias, mask_info=MaskInfo(dense=seen))[1], q, bias)
    assert (np.asarray(weights)[:, :, 2] == 0).all()
    assert (np.asarray(weights)[..., 4] == 0).all()
    np.testing.assert_allclose(np.asarray(weights).sum(-1), np.broadcast_to([1, 1, 0, 1, 1, 1], (2, 2, 6)), rtol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in pull(jnp.ones_like(weights)))


def test_attention_dropout_is_in_the_weights_and_off_by_default():
    q, k, v = qkv(16)
    run = functools.partial(attention, q, k, v, dropout_rng=jax.random.key(2), dropout_prob=0.5)
    out, weights = run(deterministic=False)
    values = np.repeat(v, 2, axis=2)
    np.testing.assert_allclose(out, np.einsum("bhts,bshv->bthv", weights, values), rtol=1e-4, atol=1e-5)
    assert 0.4 < (np.asarray(weights) == 0).mean() < 0.6
    np.testing.assert_array_equal(run()[0], attention(q, k, v)[0])


def test_attention_keeps_the_dtype_unless_asked():
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in qkv())
    assert [a.dtype for a in attention(q, k, v, softmax_dtype=None)] == [jnp.bfloat16] * 2
    assert [a.dtype for a in attention(q, k, v, dtype=jnp.float32, softmax_dtype=jnp.float32)] == [jnp.float32] * 2


def test_attention_init_bias():
    q, k, v = qkv(5)
    bias = normal(1, 1, 5, 5)
    np.testing.assert_array_equal(attention(q, k, v, init_bias=lambda: bias)[0], attention(q, k, v, bias=bias)[0])


# Class APIs, explain, mesh


def test_class_forms_run_through_the_executor():
    q, k, v, cu, _ = packed_problem([5, 8], [5, 8], value_size=8)
    run = modules.create_default_executor()
    np.testing.assert_array_equal(
        run(ejkernel.FlashAttnVarlen(), q, k, v, cu, causal=True), ejkernel.flash_attn_varlen(q, k, v, cu, causal=True)
    )
    dense = (q[None], k[None], v[None])
    expected = ejkernel.flash_attention(*dense)
    np.testing.assert_array_equal(run(ejkernel.FlashAttention(), *dense), expected)
    np.testing.assert_array_equal(run(ejkernel.ScaledDotProductAttention(), *dense), expected)
    np.testing.assert_array_equal(run(ejkernel.Attention(), *dense)[0], expected)


@pytest.mark.parametrize("name", ["flash_attention", "scaled_dot_product_attention", "attention"])
def test_explain_needs_shapes_only(name):
    shape = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16)
    assert ejkernel.explain(name, shape, shape, shape, causal=True).chosen == "xla"


def test_explain_of_packed_sequences():
    tokens, cu = jax.ShapeDtypeStruct((32, 4, 16), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.int32)
    explanation = ejkernel.explain("flash_attn_varlen", tokens, tokens, tokens, cu, cu, 16, 16, causal=True)
    assert explanation.forward.call.query_segments.shape == (1, 32)


@pytest.fixture
def mesh():
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((2, 1, 2), ("dp", "sp", "tp"), axis_types=(auto,) * 3)


SPEC = P("dp", "sp", "tp", None)


def test_mesh_gives_the_unsharded_result_and_gradients(mesh):
    q, k, v = qkv(10)
    sinks, bias = normal(4), normal(1, 4, 10, 10)
    info = MaskInfo(dense=normal(2, 1, 10, 10) > -0.5, key_lengths=np.array([10, 6], np.int32))
    options = {"causal": True, "dropout_prob": 0.3, "dropout_seed": jax.random.key(4), "mask_info": info}
    in_specs = (SPEC, SPEC, SPEC, P(None, "tp"), None, None, P("tp"))

    def loss(sharded):
        extra = {"mesh": mesh, "in_specs": in_specs, "out_specs": SPEC} if sharded else {}
        return lambda q, k, v, bias, sinks: (
            flash_attention(q, k, v, bias=bias, softmax_aux=sinks, **options, **extra) ** 2
        ).sum()

    arguments = (q, k, v, bias, sinks)
    got, wanted = (jax.jit(jax.value_and_grad(loss(sharded), (0, 1, 2, 3, 4)))(*arguments) for sharded in (True, False))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_mesh_with_one_key_head_and_lse(mesh):
    q, k, v = qkv(6, key_heads=1)
    whole = P("dp", None, None, None)
    out, lse = flash_attention(
        q, k, v, return_lse=True, mesh=mesh, in_specs=(SPEC, whole, whole), out_specs=(SPEC, P("dp", "sp", "tp"))
    )
    expected = exact(q, k, v)
    np.testing.assert_allclose(out, expected.out, **CLOSE)
    np.testing.assert_allclose(lse, expected.lse, **CLOSE)


def test_mesh_splits_masks_given_to_sdpa(mesh):
    q, k, v = qkv(6)
    lengths = np.array([6, 2], np.int32)
    mask = normal(2, 4, 6, 6) > -0.5
    out = sdpa(q, k, v, mask=mask, key_value_seq_lengths=lengths, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC)
    np.testing.assert_allclose(out, exact(q, k, v, mask=mask, key_lengths=lengths).out, **CLOSE)


def test_mesh_call_is_compiled_once(mesh):
    q, k, v = qkv(5)
    run = functools.partial(flash_attention, q, k, v, mesh=mesh, in_specs=[SPEC] * 3, out_specs=SPEC)
    run()
    with count_compilations() as compiled:
        run()
    assert compiled == []


MESH_REFUSED = [
    ({"in_specs": None}, "in_specs: got None, expected PartitionSpecs with mesh="),
    ({"in_specs": SPEC}, "in_specs: got a single PartitionSpec, expected a tuple"),
    ({"in_specs": (SPEC,) * 9}, "in_specs: got 9 entries, expected at most 8"),
    ({"in_specs": (SPEC, P(), SPEC)}, "in_specs: got batch axes () for key, expected the query's ('dp',)"),
    ({"in_specs": (SPEC, P("dp"), P("dp"))}, "in_specs: got head axes () for key, expected the query's ('tp',)"),
    ({"in_specs": (P(None, "dp"), P(), P())}, "in_specs: got the query's length split over ('dp',), expected whole sequences"),
    ({"in_specs": (P(), P(None, "dp"), P(None, "dp"))}, "in_specs: got the key's length split over ('dp',)"),
]


@pytest.mark.parametrize(("change", "text"), MESH_REFUSED, ids=[text[14:50] for _, text in MESH_REFUSED])
def test_mesh_refusals(mesh, change, text):
    settings = {"mesh": mesh, "in_specs": (SPEC,) * 3, "out_specs": SPEC}
    with pytest.raises((ValueError, TypeError)) as caught:
        flash_attention(*qkv(8), **{**settings, **change})
    assert str(caught.value).startswith(text)
