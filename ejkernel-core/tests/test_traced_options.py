"""Options that the running program computes: what travels as an array, and what is refused with a remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import MaskInfo
from ejkernel.call.traced import split_traced, with_traced
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.operations.paged_attention.first_keys import first_keys_of
from ejkernel.utils.tracing import traced_count, traced_number

Q = jnp.ones((1, 4, 2, 8))
X = jnp.ones((3, 7))


def test_traced_options_come_back_where_they_were():
    found = []

    def program(left, scale):
        options = {"window": (left, 0), "scale": scale, "cap": 2.0, "pair": [None, 1]}
        traced, static = split_traced(options)
        found.append((traced, static, with_traced(traced, static)))
        assert split_traced(options, ("scale",)) == ({"scale": scale}, {n: v for n, v in options.items() if n != "scale"})
        return left

    jax.jit(program)(3, 0.5)
    traced, static, whole = found[0]
    assert [*traced] == ["window", "scale"]
    assert static == {"window": (None, 0), "cap": 2.0, "pair": [None, 1]}
    assert whole["window"] == (traced["window"][0], 0)
    assert whole["scale"] is traced["scale"]


STATIC = {
    "causal": (True, lambda v: ejkernel.flash_attention(Q, Q, Q, causal=v)),
    "is_causal": (True, lambda v: ejkernel.scaled_dot_product_attention(Q, Q, Q, is_causal=v)),
    "dropout_prob": (0.1, lambda v: ejkernel.flash_attention(Q, Q, Q, dropout_prob=v)),
    "logits_soft_cap": (3.0, lambda v: ejkernel.flash_attention(Q, Q, Q, logits_soft_cap=v)),
    "normalize_output": (True, lambda v: ejkernel.flash_attention(Q, Q, Q, normalize_output=v)),
    "logit_softcap": (3.0, lambda v: ejkernel.fused_cross_entropy(X, jnp.zeros(3, jnp.int32), logit_softcap=v)),
    "transpose_head": (
        True,
        lambda v: ejkernel.fused_cross_entropy(
            None, jnp.zeros(3, jnp.int32), hidden=X, lm_head_weight=jnp.ones((5, 7)), transpose_head=v
        ),
    ),
    "beta": (0.5, lambda v: ejkernel.fused_kl_divergence(X, X, direction="jsd", beta=v)),
    "axis": (-1, lambda v: ejkernel.softmax(X, axis=v)),
    "epsilon": (1e-6, lambda v: ejkernel.rms_norm(X, epsilon=v)),
    "block_size": (2, lambda v: ejkernel.native_sparse_attention(Q, Q, Q, block_size=v)),
    "num_layers": (2, lambda v: ejkernel.lightning_attention(Q, Q, Q, layer_idx=0, num_layers=v)),
    "prefix": (2, lambda v: MaskInfo(causal=True, prefix=v, sizes=(1, 4, 4)).materialize()),
}


@pytest.mark.parametrize(("name", "value", "call"), [(name, *given) for name, given in STATIC.items()], ids=STATIC)
def test_static_options_name_argument_and_remedy(name, value, call):
    with pytest.raises(TypeError, match=rf"^{name}: got a traced value, expected .*; mark it static in jax.jit, or choose"):
        jax.jit(call)(value)


@pytest.mark.parametrize(("name", "function"), [("window", "apply_sliding_window"), ("chunk_size", "apply_chunked")])
def test_masks_name_the_function_that_takes_traced_values(name, function):
    with pytest.raises(TypeError, match=rf"^{name}: got a traced value, .*MaskInfo\.{function} takes traced values"):
        jax.jit(lambda v: MaskInfo(**{name: v}, sizes=(1, 4, 4)).materialize())(2)


WRONG = {
    "window of floats": ({"sliding_window": 1.5}, TypeError, "^sliding_window: got a traced value of dtype float32"),
    "chunks of floats": ({"chunk_size": 1.5}, TypeError, "^chunk_size: got a traced value of dtype float32"),
    "scale of booleans": ({"softmax_scale": True}, TypeError, "^softmax_scale: got a traced value of dtype bool"),
    "several scales": (
        {"softmax_scale": jnp.ones(2)},
        ValueError,
        r"^softmax_scale: got a traced value of shape \(2,\).*jax.vmap",
    ),
    "three sides": ({"sliding_window": (1, 2, 3)}, ValueError, "^sliding_window: got .*expected an int or a pair"),
}


@pytest.mark.parametrize(("given", "error", "message"), WRONG.values(), ids=WRONG)
def test_traced_values_of_the_wrong_kind(given, error, message):
    with pytest.raises(error, match=message):
        jax.jit(lambda given: ejkernel.flash_attention(Q, Q, Q, **given))(given)


def test_traced_windows_of_paged_attention_that_end_elsewhere_are_refused():
    pages, lengths = jnp.ones((2, 4, 2, 8)), MaskInfo(key_lengths=jnp.array([4]), sizes=(1, 2, 4))
    tables = jnp.zeros((1, 1), jnp.int32)

    def call(right):
        return ejkernel.flash_attention(
            Q[:, :2], pages, pages, block_tables=tables, mask_info=lengths, sliding_window=(1, right)
        )

    with pytest.raises(ValueError, match=r"^sliding_window: got a traced value, expected \(left, 0\) with block_tables"):
        jax.jit(call)(0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_counts_are_held_within_their_range(dtype):
    values = jnp.array([0, 5, 120], dtype)
    assert jax.jit(jax.vmap(lambda v: traced_count("count", v, 1)))(values).tolist() == [1, 5, 120]
    if dtype == "uint32":
        assert jax.jit(lambda v: traced_count("count", v, 0))(jnp.uint32(2**32 - 1)) == 2**31 - 1
    if dtype == "int32":
        assert jax.jit(lambda v: traced_count("count", v, 0))(jnp.int32(-3)) == 0


def test_numbers_take_the_dtype_that_is_asked_for():
    assert jax.jit(lambda v: traced_number("number", v, jnp.float32))(3).dtype == jnp.float32


def test_a_traced_window_of_dense_attention_is_a_mask_and_no_static_window():
    def program(window, chunk, scale):
        given = {"sliding_window": (window, None), "chunk_size": chunk, "softmax_scale": scale}
        bound = OPERATION.canonicalise(Q, Q, Q, causal=True, **given)
        assert (bound.call.window, bound.call.chunk_size) == (None, None)
        assert bound.call.softmax_scale == pytest.approx(8**-0.5)
        return bound.inputs.mask, bound.inputs.query

    mask, query = jax.jit(program)(1, 3, 2 * 8**-0.5)
    i, j = jnp.arange(4)[:, None], jnp.arange(4)[None]
    assert (mask[0, 0] == ((i - j <= 1) & (i // 3 == j // 3))).all()
    assert jnp.allclose(query, 2, rtol=1e-6)


def test_first_keys_of_a_window_and_of_chunks():
    """Requests of 2 and 1 new tokens that end at key 5 and 9; the fourth token belongs to none."""
    starts, lengths = jnp.array([[0, 2, 3]]), jnp.array([[5, 9]])
    window, chunk = jnp.int32(3), jnp.int32(4)
    assert first_keys_of(None, window, None, starts, lengths, 4)[0, :3].tolist() == [1, 2, 6]
    assert first_keys_of(None, None, chunk, starts, lengths, 4)[0, :3].tolist() == [0, 4, 8]
    assert first_keys_of(jnp.array([4, 0, 7, 0]), window, chunk, starts, lengths, 4)[0, :3].tolist() == [4, 4, 8]
    assert first_keys_of(None, None, None, starts, lengths, 4) is None
