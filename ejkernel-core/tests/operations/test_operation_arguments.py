"""What each operation refuses, and that the message names argument, got and expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.operations import get_operation
from ejkernel.testing.problem import cases_of

X = np.ones((2, 3, 8), np.float32)
Q = np.ones((2, 5, 4, 8), np.float32)
C = np.ones((5, 4), np.float32)
G2 = np.array([1, 2], np.int32)
EIGHT = np.ones(8, np.float32)
QKV = (Q, Q[:, :, :2], Q[:, :, :2, :3])
SCAN = (X, Q[0, :3].reshape(12, 8)[:8], X, X, EIGHT, X)
SLOTS = np.zeros((2, 5, 4, 3), np.int32)
OWN = np.zeros((1, 5), np.int32)
Q4, S4 = np.ones((8, 8), np.uint32), np.ones((8, 1), np.float32)
G1, QUANTIZED = np.array([1], np.int32), (Q4[None], S4[None], S4[None])

_NORM = [
    ((X, EIGHT[:5]), {}, ValueError, r"scale: got shape \(5,\), expected \(8,\)"),
    ((X, None, X), {}, ValueError, r"offset: got shape \(2, 3, 8\), expected \(8,\)"),
    (([1.0],), {}, TypeError, "x: got list, expected an array"),
    ((X,), {"axis": 3}, ValueError, r"axis: got 3, expected a value in \[-3, 2\]"),
    ((X,), {"axis": 1.0}, TypeError, "axis: got 1.0, expected an int"),
    ((X,), {"axis": None}, TypeError, "axis: got None, expected an int"),
    ((X,), {"axis": (1, -2)}, ValueError, r"axis: got \(1, -2\), expected one or more axes, each once"),
    ((X,), {"axis": (1, 3)}, ValueError, r"axis: got 3, expected a value in \[-3, 2\]"),
    ((X, EIGHT), {"axis": (1, 2)}, ValueError, r"scale: got shape \(8,\), expected \(3, 8\) = \[size of x along axis\]"),
    ((X,), {"epsilon": -1e-6}, ValueError, "epsilon: got -1e-06, expected a value >= 0"),
    ((X,), {"scale_offset": 1.0}, ValueError, "scale_offset: got 1.0, expected 0 without scale; pass scale"),
    ((X, EIGHT), {"scale_offset": "1"}, TypeError, "scale_offset: got '1', expected a number"),
    ((X[0, 0, 0],), {}, ValueError, r"x: got shape \(\), expected at least one axis"),
]

B = np.ones((2, 5, 4), np.float32)
S = np.ones((2, 4, 8, 8), np.float32)
IDS = np.zeros((2, 5), np.int32)
FILTERS = np.ones((8, 4), np.float32)
N8, ONE = np.ones((8, 8), jnp.float8_e4m3fn), np.float32(1)
KEY = np.zeros(2, np.uint32)
ROWS = np.ones((2, 3), np.int32)

_ROPE = [
    ((Q[0, 0], Q, C, C), {}, ValueError, r"query: got shape \(4, 8\) with 2 axes, expected 4 axes, or 3 without a batch"),
    ((Q[0], Q, C, C), {}, ValueError, r"key: got shape \(2, 5, 4, 8\) with 4 axes, expected 3 axes"),
    ((Q, Q[:, :4], C, C), {}, ValueError, r"key: got shape \(2, 4, 4, 8\), expected batch 2, length 5 and head size 8"),
    ((Q, Q, C, C[:, :2]), {}, ValueError, r"sin: got 2 channels, expected rotary_dim = 8, or half of it"),
    ((Q, Q, C, np.tile(C, 2)), {}, ValueError, r"sin: got float32\[1,5,8\], expected float32\[1,5,4\] as cos"),
    ((Q, Q, C[:4], C), {}, ValueError, r"cos: got shape \(4, 4\), expected \[5, w\], \[1, 5, w\] or \[2, 5, w\]"),
    ((Q, Q, C, C), {"rotary_dim": 16}, ValueError, "rotary_dim: got 16, expected an even number of channels, at most 8"),
    ((Q, Q, C, C), {"rotary_dim": 3}, ValueError, "rotary_dim: got 3, expected an even number"),
    ((Q, Q, C, C), {"rotary_dim": 2}, ValueError, "cos: got 4 channels, expected rotary_dim = 2, or half of it"),
    ((Q, Q, C, C), {"layout": "THD"}, ValueError, "layout: got 'THD', expected 'BTHD' or 'BHTD'"),
]

ANY_NUMBER = {("sample_tokens", name) for name in ("temperature", "top_p", "min_p")}
"""Array arguments whose dtype may be that of integers as well as that of floats."""


def calls_of(operation: str) -> Iterator[dict[str, Any]]:
    """The arguments of every case."""
    for case in cases_of(operation):
        yield {**case.options, **case.arrays(np.random.default_rng(0))}


def wrong_values(argument: str, annotation: str, value: Any) -> Iterator[tuple[Any, type[Exception], str]]:
    """Values that an argument refuses which is annotated so and `value` in a case, and what the error says of each."""
    if hasattr(value, "dtype"):
        if value.dtype.kind == "f":
            yield np.zeros(value.shape, np.int32), TypeError, r"got (dtype )?int32, expected (a floating type|float32)"
        else:
            expected = "(integers|an int|bool|uint|int8|float8|a key)"
            yield np.zeros(value.shape, np.float32), TypeError, f"got (dtype )?float32, expected {expected}"
    elif argument == "precision":
        yield "best", ValueError, "got 'best', expected None or one of default"
    elif annotation == "bool":
        yield 1, TypeError, "got 1, expected (a bool|True or False)"
    elif annotation in ("float", "float | None"):
        yield float("nan"), ValueError, "got nan, expected a finite number"
        yield "1", TypeError, "got '1', expected a number"
    elif annotation in ("str", "str | None"):
        yield "no such word", ValueError, "got 'no such word', expected"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_wrong_types_of_every_argument(operation: str) -> None:
    """Of arrays, switches, numbers, words and precisions, as the signature and the cases have them: they need no row below."""
    canonicalise = get_operation(operation).canonicalise
    usual, tried = next(calls_of(operation)), 0
    for name, parameter in inspect.signature(canonicalise).parameters.items():
        call = next((call for call in calls_of(operation) if name in call), usual)
        if (operation, name) in ANY_NUMBER:
            continue
        said_of = r"\w*soft_?cap" if re.search("soft_?cap", name) else name
        for value, error, message in wrong_values(name, str(parameter.annotation), call.get(name)):
            with pytest.raises(error, match=f"^{said_of}: {message}"):
                canonicalise(**{**call, name: value})
            tried += 1
    assert tried


REFUSED: dict[str, list[Any]] = {
    "add_rms_norm": [
        ((X, X[:1]), {}, ValueError, r"residual: got shape \(1, 3, 8\), expected \(2, 3, 8\), the shape of x"),
        ((X, None), {}, TypeError, "residual: got NoneType, expected an array"),
        ((X, X, EIGHT[:5]), {}, ValueError, r"scale: got shape \(5,\), expected \(8,\) = \[size of x along axis\]"),
        ((X, X), {"axis": 3}, ValueError, r"axis: got 3, expected a value in \[-3, 2\]"),
        ((X, X), {"epsilon": -1e-6}, ValueError, "epsilon: got -1e-06, expected a value >= 0"),
        ((X, X), {"scale_offset": 1.0}, ValueError, "scale_offset: got 1.0, expected 0 without scale; pass scale"),
        ((X[0, 0, 0], X[0, 0, 0]), {}, ValueError, r"x: got shape \(\), expected at least one axis"),
    ],
    "qk_norm_rope": [
        *_ROPE,
        ((Q, None, C, C), {}, TypeError, "key: got None, expected an array; rms_norm, then rope"),
        ((Q, Q), {}, TypeError, "cos: got None, expected an array; LlamaRotaryEmbedding"),
        ((Q, Q, C, C, EIGHT[:4]), {}, ValueError, r"query_scale: got shape \(4,\), expected \(8,\) = \[head size\]"),
        ((Q, Q, C, C, EIGHT, Q[0, 0]), {}, ValueError, r"key_scale: got shape \(4, 8\), expected \(8,\) = \[head size\]"),
        ((Q, Q, C, C, EIGHT), {"scale_offset": 1.0}, ValueError, "scale_offset: got 1.0, expected 0 without key_scale; pass"),
        ((Q, Q, C, C), {"epsilon": "1"}, TypeError, "epsilon: got '1', expected a number"),
    ],
    "delta_rule": [
        ((Q[0], Q, Q), {}, ValueError, r"query: got shape \(5, 4, 8\) with 3 axes, expected 4 axes"),
        ((Q, Q[..., :3], Q), {}, ValueError, r"key: got shape \(2, 5, 4, 3\), expected \(2, 5, 4, 8\), with batch, length"),
        ((Q, Q, Q[:, :4]), {}, ValueError, r"value: got shape \(2, 4, 4, 8\), expected \(2, 5, 4, 8\)"),
        ((Q, Q[:, :, :3], Q), {}, ValueError, "key: got 3 heads, expected a number that divides 4"),
        ((Q, Q.astype(np.float16), Q), {}, TypeError, "key: got dtype float16, expected float32, the dtype of query"),
        ((Q, Q, Q, Q), {}, ValueError, r"beta: got shape \(2, 5, 4, 8\), expected \(2, 5, 4\)"),
        ((Q, Q, Q, B, Q[..., :3]), {}, ValueError, r"decay: got .*, expected \(2, 5, 4, 8\) or \(2, 5, 4\)"),
        ((Q, Q, Q, B, B, S[:1]), {}, ValueError, r"initial_state: got shape \(1, 4, 8, 8\), expected \(2, 4, 8, 8\)"),
        ((Q, Q, Q), {"a": B}, ValueError, r"a: got shape \(2, 5, 4\), expected \(2, 5, 4, 8\)"),
        ((Q, Q, Q), {"seg_ids": IDS[:, :4]}, ValueError, r"seg_ids: got shape \(2, 4\), expected \(2, 5\) or \(1, 5\)"),
        ((Q, Q, Q), {"seg_ids": B[..., 0]}, TypeError, "seg_ids: got dtype float32, expected integers"),
        ((Q, Q, Q), {"cu_seqlens": np.array([0, 5])}, ValueError, "query: got batch 2, expected batch 1 with cu_seqlens; pack"),
        (
            (Q[:1], Q[:1], Q[:1]),
            {"cu_seqlens": np.array([0, 5]), "seg_ids": IDS[:1]},
            ValueError,
            "seg_ids: got an array, expected None beside cu_seqlens",
        ),
    ],
    "causal_conv1d": [
        ((X[0], C), {}, ValueError, r"x: got shape \(3, 8\) with 2 axes, expected 3 axes"),
        ((X, X[0]), {}, ValueError, r"weight: got shape \(3, 8\), expected \(8, 8\) = \[C, W\]"),
        ((X, EIGHT[:, None]), {}, ValueError, "weight: got a width of 1, expected at least 2; a width of 1 is a product"),
        ((X, None), {}, TypeError, "weight: got NoneType, expected an array"),
        ((X, FILTERS, EIGHT[:5]), {}, ValueError, r"bias: got shape \(5,\), expected \(8,\) = \[C\]"),
        ((X, FILTERS, None, X[:, :2]), {}, ValueError, r"initial_state: got .*, expected \(2, 3, 8\) = \[B, W - 1, C\]"),
        ((X, FILTERS), {"seg_ids": IDS}, ValueError, r"seg_ids: got shape \(2, 5\), expected \(2, 3\) or \(1, 3\)"),
        ((X, FILTERS), {"seg_ids": X[..., 0]}, TypeError, "seg_ids: got dtype float32, expected integers"),
        ((X, FILTERS), {"cu_seqlens": np.array([0, 3])}, ValueError, "x: got batch 2, expected batch 1 with cu_seqlens; pack"),
        (
            (X[:1], FILTERS),
            {"cu_seqlens": np.array([0, 3]), "seg_ids": ROWS[:1].astype(np.int32)},
            ValueError,
            "seg_ids: got an array, expected None beside cu_seqlens",
        ),
        ((X, FILTERS), {"activation": "gelu"}, ValueError, "activation: got 'gelu', expected None or 'silu'"),
    ],
    "cross_entropy": [
        ((X, ROWS[0]), {}, ValueError, r"targets: got shape \(3,\), expected \(2, 3\), one label for each row"),
        ((X, X[..., 0]), {}, TypeError, "targets: got float32, expected integers"),
        ((X[..., :0], ROWS), {}, ValueError, "x: got a vocabulary of 0, expected at least one entry"),
        ((X, ROWS, C), {}, ValueError, r"head: got shape \(5, 4\), expected \[D, V\] with D = 8 as in x"),
        ((X, ROWS, None, EIGHT), {}, ValueError, "head: got None, expected a head beside head_bias"),
        ((X, ROWS, X[0], EIGHT), {"transpose_head": True}, ValueError, r"head_bias: got shape \(8,\), expected \(3,\)"),
        ((X, ROWS), {"logit_softcap": 0.0}, ValueError, "logit_softcap: got 0.0, expected a value > 0"),
    ],
    "linear_cross_entropy": [
        ((X, ROWS, None), {}, TypeError, "head: got"),
        ((X, ROWS, C), {}, ValueError, r"head: got shape \(5, 4\), expected \[D, V\] with D = 8 as in x"),
        ((X, ROWS, X[0].T, None, ROWS[0] * 1.0), {}, ValueError, r"weights: got shape \(3,\), expected \(2, 3\)"),
        ((X, ROWS, X[0].T), {"label_smoothing": 1.5}, ValueError, r"label_smoothing: got 1.5, expected a value in \[0, 1\]"),
        ((X, ROWS, X[0].T), {"z_loss": -1.0}, ValueError, "z_loss: got -1.0, expected a value >= 0"),
    ],
    "kl_divergence": [
        ((X, X[:1]), {}, ValueError, r"teacher: got rows \(1, 3\), expected \(2, 3\) as in student"),
        ((X, X[..., :7]), {}, ValueError, "teacher: got a vocabulary of 7, expected 8"),
        ((X, X, None, None, ROWS), {}, TypeError, "valid: got dtype int32, expected bool"),
        ((X, X), {"transpose_heads": True}, ValueError, "transpose_heads: got True, expected False without heads"),
        ((X, X), {"direction": "jsd", "beta": -0.1}, ValueError, r"beta: got -0.1, expected a value in \[0, 1\]"),
        ((X, X, C), {}, ValueError, r"student_head: got shape \(5, 4\), expected \[D, V\] with D = 8 as in student"),
    ],
    "gated_linear_unit": [
        ((X[0, 0, 0],), {}, ValueError, r"gate: got shape \(\), expected at least one axis"),
        ((X[..., :5],), {}, ValueError, "gate: got 5 channels, expected an even number of them, gate and up, beside up=None"),
        ((X, X[:1]), {}, ValueError, r"up: got shape \(1, 3, 8\), expected \(2, 3, 8\) = shape of gate"),
        ((X, X.astype(np.float16)), {}, TypeError, "up: got dtype float16, expected float32 as gate"),
        ((X, X), {"activation": "swish"}, ValueError, "activation: got 'swish', expected one of silu, gelu, gelu_tanh, relu"),
        ((X, X), {"activation": "relu", "alpha": 2}, ValueError, "alpha: got 2.0, expected 1 beside activation 'relu'; it is"),
        ((X, X), {"limit": -1}, ValueError, "limit: got -1.0, expected a value >= 0"),
        ((X, X), {"up_offset": np.inf}, ValueError, "up_offset: got inf, expected a finite number"),
    ],
    "grouped_matmul": [
        ((X[0], X, G2), {}, ValueError, r"rhs: got shape \(2, 3, 8\), expected \[G, K, N\] with K = 8 as in lhs"),
        ((X[0, :, :4], X, G2), {"transpose_rhs": True}, ValueError, r"expected \[G, N, K\] with K = 4 as in lhs"),
        ((X, X, G2), {}, ValueError, r"lhs: got shape \(2, 3, 8\) with 3 axes, expected 2 axes"),
        ((X[0, :, :3], X, G2[:1]), {}, ValueError, "group_sizes: got 1 groups, expected 2 as in rhs"),
        ((X[0, :, :3], X[:1], G2), {}, ValueError, "group_sizes: got 2 groups, expected 1 as in rhs; group_offset="),
        ((X[0, :, :3], X, G2[:1], 0), {}, ValueError, "group_sizes: got 1 groups, expected at least 2 as in rhs"),
        ((X[0, :, :3], X, G2, 1.5), {}, TypeError, "group_offset: got dtype float.., expected an integer"),
        ((X[0, :, :3], X, G2, G2), {}, ValueError, r"group_offset: got shape \(2,\), expected a scalar or \[1\]"),
        ((X[0, :, :3], X, G2, None, X[0, :2]), {}, ValueError, r"existing_out: got shape \(2, 8\), expected \(3, 8\)"),
        (
            (X[0, :, :3], X, G2, None, X[0].astype(np.float16)),
            {},
            TypeError,
            "existing_out: got dtype float16, expected float32",
        ),
        ((X[0, :, :3], X, G2), {"preferred_element_type": np.int32}, TypeError, "preferred_element_type: got dtype int32"),
        ((X[0, :, :3].astype(np.int8), X, G2), {}, TypeError, "lhs: got dtype int8, expected a floating type"),
        ((X[0, :, :3], X.astype(np.int16), G2), {}, TypeError, "rhs: got dtype int16, expected a floating type or int8"),
        ((X[0, :, :3], X, G2, None, None, EIGHT), {}, ValueError, r"rhs_scale: got shape \(8,\), expected \(2,\) or \(2, 8\)"),
        (
            (X[0, :, :3], X, G2, None, None, None, EIGHT),
            {},
            ValueError,
            r"bias: got shape \(8,\), expected \(2, 8\) = \[G, N\]",
        ),
        (
            (X[0, :, :3], X, G2, None, None, None, None, EIGHT),
            {},
            ValueError,
            r"lhs_scale: got shape \(8,\), expected \(3,\) or \(\) = \[M\] or one number",
        ),
        (
            (X[0, :, :3].astype(jnp.float8_e4m3fn), X, G2),
            {},
            TypeError,
            "rhs: got dtype float32, expected float8_e4m3fn or float8_e5m2 beside lhs in float8_e4m3fn; or convert lhs",
        ),
        (
            (X[0, :, :3].astype(jnp.float8_e4m3), X.astype(jnp.float8_e4m3fn), G2),
            {},
            TypeError,
            "lhs: got dtype float8_e4m3, expected float32, bfloat16 or float16",
        ),
        (
            (X[0, :, :3].astype(jnp.float8_e5m2), X.astype(jnp.float8_e4m3fn), G2),
            {"preferred_element_type": jnp.float8_e5m2},
            TypeError,
            "preferred_element_type: got dtype float8_e5m2, expected float32, bfloat16 or float16",
        ),
    ],
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "linear_recurrence": [
        ((X, X, X), {}, ValueError, r"query: got shape \(2, 3, 8\) with 3 axes, expected 4 axes"),
        ((Q, Q[:, :, :, :4], Q), {}, ValueError, r"key: got .* expected batch 2, length 5 and 8 channels as query"),
        ((Q, Q, Q[:, :3]), {}, ValueError, r"value: got shape \(2, 3, 4, 8\), expected batch 2, length 5 as query"),
        ((Q, Q[:, :, :3], Q), {}, ValueError, "key: got .* heads, expected the fewest, 3, to divide the most, 4"),
        ((Q, Q[:, :, :2], Q[:, :, :1]), {}, ValueError, "key: got 2 heads, expected 1 or 4, as the others"),
        ((*QKV, Q), {}, ValueError, r"g: got shape \(2, 5, 4, 8\) with 4 axes, expected 3 axes"),
        ((*QKV, Q[:, :, :3, 0]), {}, ValueError, r"g: got shape \(2, 5, 3\), expected \(2, 5, 4\) or \(2, 5, 2\)"),
        ((*QKV, None, EIGHT), {}, ValueError, r"g_gamma: got shape \(1, 8\), expected \(1, 4\) or \(1, 2\)"),
        ((*QKV, None, None, Q[..., :3]), {}, ValueError, r"gk: got .* expected \(2, 5, 4, 8\) or \(2, 5, 2, 8\)"),
        ((*QKV, None, None, None, Q), {}, ValueError, r"gv: got .* expected \(2, 5, 4, 3\) or \(2, 5, 2, 3\)"),
        ((*QKV,), {"bonus": Q[0, 0, :, :3]}, ValueError, r"bonus: got shape \(4, 3\), expected \(4, 8\) or \(2, 8\)"),
        ((*QKV,), {"value_scale": Q}, ValueError, r"value_scale: got shape \(2, 5, 4, 8\) with 4 axes, expected 3 axes"),
        ((*QKV,), {"value_scale": Q[:, :, :3, 0]}, ValueError, r"value_scale: got .* expected \(2, 5, 4\) or \(2, 5, 2\)"),
        ((*QKV,), {"skip": EIGHT}, ValueError, r"skip: got shape \(8,\), expected \(4,\) or \(2,\)"),
        ((*QKV,), {"skip": Q[0, 0]}, ValueError, r"skip: got shape \(4, 8\), expected \(4, 3\) or \(2, 3\)"),
        ((*QKV,), {"initial_state": Q}, ValueError, r"initial_state: got .* expected \(2, 4, 8, 3\) = \[B, H, D, V\]"),
        ((*QKV,), {"cu_seqlens": G2}, ValueError, "query: got batch 2, expected batch 1 with cu_seqlens; pack"),
        ((*QKV,), {"cu_seqlens": G2 / 2}, TypeError, "cu_seqlens: got dtype float64, expected integers"),
    ],
    "rwkv4": [
        ((EIGHT, EIGHT, X[0], X[0]), {}, ValueError, r"k: got shape \(3, 8\) with 2 axes, expected 3 axes"),
        ((EIGHT[:5], EIGHT, X, X), {}, ValueError, r"w: got shape \(5,\), expected \(8,\) = \[C\]"),
        ((EIGHT, EIGHT, X, X[:, :2]), {}, ValueError, r"v: got .* expected \(2, 3, 8\) = \[B, T, C\] as k"),
        ((EIGHT, EIGHT, X, X, X[:, :2]), {}, ValueError, r"state: got .* expected \(2, 3, 8\) = \[B, 3, C\]"),
    ],
    "selective_scan": [
        ((X[0], *SCAN[1:]), {}, ValueError, r"x: got shape \(3, 8\) with 2 axes, expected 3 axes"),
        ((X, SCAN[1][:5], *SCAN[2:]), {}, ValueError, r"A: got shape \(5, 8\), expected \(8, 8\) = \[I, N\]"),
        ((*SCAN[:2], X[:, :2], *SCAN[3:]), {}, ValueError, r"B: got .* expected \(2, 3, 8\) = \[B, T, N\]"),
        ((*SCAN[:4], EIGHT[:2], X), {}, ValueError, r"D: got shape \(2,\), expected \(8,\) = \[I\]"),
        ((*SCAN[:5], None), {}, TypeError, "dt: got NoneType, expected an array"),
        ((*SCAN, X), {}, ValueError, r"initial_state: got .* expected \(2, 8, 8\) = \[B, I, N\]"),
    ],
    "mean_pooling": [
        ((X[0],), {}, ValueError, r"x: got shape \(3, 8\), expected \[B,T,H,D\] or \[B,T,D\]"),
        ((X, np.array([0, 3])), {}, ValueError, "x: got batch 2, expected batch 1 with cu_seqlens; pack"),
        ((X[:1], np.array([[0, 3]])), {}, ValueError, r"cu_seqlens: got shape \(1, 2\) with 2 axes, expected 1 axes"),
        ((X[:1], np.array([], np.int32)), {}, ValueError, r"cu_seqlens: got no element, expected \[n \+ 1\]"),
    ],
    "native_sparse_attention": [
        ((Q, Q, Q, SLOTS[..., 0]), {}, ValueError, r"block_indices: got shape \(2, 5, 4\) with 3 axes, expected 4 axes"),
        (
            (Q, Q, Q, SLOTS[:, :4]),
            {},
            ValueError,
            r"block_indices: got shape \(2, 4, 4, 3\), expected \[B,T,K,S\] with .*2, 5, 4",
        ),
        ((Q, Q[:, :4], Q[:, :4], SLOTS), {}, ValueError, "key: got length 4, expected the query's 5"),
        ((Q, Q[:, :, :3], Q[:, :, :3], SLOTS), {}, ValueError, "query: got 4 heads, expected a multiple of the 3 key heads"),
        ((Q, Q, Q, SLOTS, SLOTS), {}, ValueError, r"block_counts: got shape \(2, 5, 4, 3\), expected an int, or \[B,T,K\]"),
        ((Q, Q, Q, SLOTS, -1), {}, ValueError, "block_counts: got -1, expected a value >= 0"),
        ((Q, Q, Q, SLOTS, 1.5), {}, TypeError, "block_counts: got 1.5, expected an int"),
        ((Q, Q, Q, SLOTS, None, np.array([0, 5])), {}, ValueError, "query: got batch 2, expected batch 1 with cu_seqlens"),
        ((Q, Q, Q, SLOTS), {"block_size": 0}, ValueError, "block_size: got 0, expected a value >= 1"),
        ((Q, Q, Q, SLOTS), {"softmax_scale": float("inf")}, ValueError, "softmax_scale: got inf, expected a finite number"),
    ],
    "quantized_matmul": [
        ((X[0, 0, 0], Q4, S4, S4), {}, ValueError, r"x: got shape \(\), expected \[..., K\]"),
        (
            (X[0], Q4[:5], S4[:5], S4[:5]),
            {},
            ValueError,
            r"w: got packed weights of 5 x 64, expected \[K, N\] with K = 8 as in x",
        ),
        ((X[0], Q4, S4, S4), {"transpose": True}, ValueError, r"expected \[N, K\] with K = 8 as in x; transpose=False reads"),
        ((X[0], Q4.astype(np.int32), S4, S4), {}, TypeError, "w: got dtype int32, expected uint32, as quantize returns it"),
        ((X[0], Q4, S4), {}, TypeError, "zeros: got None, expected an array for mode 'affine'"),
        ((X[0], Q4, S4, S4), {"bits": 8}, ValueError, "w: got 8 words per row, expected 16 for 1 groups of 64 codes of 8 bits"),
        ((X[0], Q4, S4), {"mode": "mxfp4"}, TypeError, "scales: got dtype float32, expected uint8, the E8M0 codes"),
        ((X[0], Q4[None], S4[None], S4[None]), {}, ValueError, r"w: got shape \(1, 8, 8\) with 3 axes, expected 2 axes"),
        ((X[0], Q4[None], S4[None], S4[None]), {}, ValueError, "2 axes; group_sizes= says how many rows of x belong to each"),
        ((X[0], Q4, S4, S4, G1), {}, ValueError, r"w: got shape \(8, 8\) with 2 axes, expected 3 axes.* beside group_sizes"),
        ((X, *QUANTIZED, G1), {}, ValueError, r"x: got shape \(2, 3, 8\), expected \[M, K\] beside group_sizes"),
        ((X[0], *QUANTIZED, G2), {}, ValueError, "group_sizes: got 2 groups, expected 1 as in w; group_offset= says"),
        ((X[0], *QUANTIZED, G1, 0.5), {}, TypeError, "group_offset: got dtype float.*, expected an integer"),
        ((X[0], Q4, S4, S4, None, 1), {}, ValueError, "group_offset: got 1, expected None without group_sizes"),
        ((X[0], Q4, S4, S4), {"transpose": 0}, TypeError, "transpose: got 0, expected a bool"),
        ((X[0], Q4, S4, S4), {"mode": "int4"}, ValueError, "mode: got 'int4', expected one of affine, nf4"),
    ],
    "rope": [
        ((Q, None, None, C), {}, TypeError, r"cos: got None, expected an array; LlamaRotaryEmbedding"),
        *_ROPE,
    ],
    "sample_tokens": [
        ((X[0, :, :0], KEY), {}, ValueError, r"logits: got shape \(3, 0\), expected \[..., V\] with V of at least 1"),
        ((X[0], None), {}, TypeError, "key: got NoneType, expected a key of jax.random, or one for each row"),
        ((X[0], G2), {}, TypeError, "key: got dtype int32, expected a key of jax.random"),
        (
            (X[0], np.zeros(3, np.uint32)),
            {},
            ValueError,
            r"key: got uint32 of shape \(3,\), expected 2 or 4 words for each key",
        ),
        ((X[0], np.zeros((2, 2), np.uint32)), {}, ValueError, r"key: got keys of shape \(2,\), expected one key, or \(3,\)"),
        ((X[0], KEY, X[0]), {}, ValueError, r"temperature: got shape \(3, 8\), expected one number, or \(3,\)"),
        (
            (X[0], KEY, X[0, :, 0] > 0),
            {},
            TypeError,
            "temperature: got dtype bool, expected a real number, or one for each row",
        ),
        ((X[0], KEY, 1.0, X[0, :, 0]), {}, TypeError, "top_k: got float32, expected an int, or integers, one for each row"),
        ((X[0], KEY, 1.0, None, X[0, :2, 0]), {}, ValueError, r"top_p: got shape \(2,\), expected one number, or \(3,\)"),
        ((X[0], KEY, 1.0, None, None, None, X[0]), {}, TypeError, "token_mask: got dtype float32, expected bool; True marks"),
        (
            (X[0], KEY, 1.0, None, None, None, X[0, :2] > 0),
            {},
            ValueError,
            r"token_mask: got shape \(2, 8\), expected a shape that broadcasts to \(3, 8\) = logits",
        ),
    ],
    "moe_permute": [
        ((X, ROWS), {"num_experts": 4}, ValueError, "x: got shape .* with 3 axes, expected 2 axes"),
        ((X[0], ROWS), {"num_experts": 4}, ValueError, r"experts: got shape \(2, 3\), expected \(3, 3\) = \[T, k\]"),
        (
            (X[0, :2], ROWS[:, :0]),
            {"num_experts": 4},
            ValueError,
            r"experts: got shape \(2, 0\), expected \(2, 1\) = .* k >= 1",
        ),
        ((X[0, :2], X[0, :2]), {"num_experts": 4}, TypeError, "experts: got dtype float32, expected integers"),
        ((X[0, :2], ROWS), {"num_experts": 0}, ValueError, "num_experts: got 0, expected at least 1"),
        ((X[0, :2], ROWS), {"num_experts": 4.0}, TypeError, "num_experts: got 4.0, expected an int"),
    ],
    "moe_route": [
        ((X,), {"k": 2}, ValueError, "logits: got shape .* with 3 axes, expected 2 axes"),
        ((ROWS,), {"k": 2}, TypeError, "logits: got dtype int32, expected a floating type"),
        ((X[0], EIGHT[:5]), {"k": 2}, ValueError, r"bias: got shape \(5,\), expected \(8,\) = \[E\]"),
        ((X[0],), {"k": 0}, ValueError, "k: got 0, expected at least 1"),
        ((X[0],), {"k": 9}, ValueError, "k: got 9, expected at most 8, the experts"),
        ((X[0],), {"k": 2, "scoring": "relu"}, ValueError, "scoring: got 'relu', expected 'softmax' or 'sigmoid'"),
        ((X[0],), {"k": 2, "num_groups": 3}, ValueError, "num_groups: got 3, expected a divisor of 8 = E"),
        ((X[0],), {"k": 2, "num_groups": 4, "top_groups": 5}, ValueError, "top_groups: got 5, expected at most num_groups = 4"),
        ((X[0],), {"k": 5, "num_groups": 4, "top_groups": 2}, ValueError, "k: got 5, expected at most 4, .* in 2 of 4 groups"),
        ((X[0],), {"k": 2, "normalize": 1}, TypeError, "normalize: got 1, expected a bool"),
        ((X[0],), {"k": 2, "scale": float("inf")}, ValueError, "scale: got inf, expected a finite number"),
    ],
    "moe_unpermute": [
        ((X[0], ROWS), {}, ValueError, r"rows: got 3 rows, expected 6 = T \* k of positions \(2, 3\)"),
        ((X[0], ROWS[0]), {}, ValueError, "positions: got shape .* with 1 axes, expected 2 axes"),
        ((X.reshape(6, 8), ROWS, EIGHT), {}, ValueError, r"weights: got shape \(8,\), expected \(2, 3\) = \[T, k\]"),
    ],
    "fused_linear": [
        ((X[0, 0, 0], X[0]), {}, ValueError, r"x: got shape \(\), expected \[..., K\]"),
        ((X, EIGHT), {}, ValueError, r"weight: got shape \(8,\) with 1 axes, expected 2 axes"),
        ((X, X[0, :, :5]), {}, ValueError, r"weight: got shape \(3, 5\), expected \[N, K\] with K = 8 as in x"),
        ((X, X[0].T), {}, ValueError, "weight: .* as in x; transpose it: inputs are last"),
        ((X, X[0].astype(np.float16)), {}, TypeError, "weight: got dtype float16, expected float32 as x"),
        ((X, X[0], EIGHT[:5]), {}, ValueError, r"norm_scale: got shape \(5,\), expected \(8,\) = \[K\]"),
        ((X, X[0], None, EIGHT), {}, ValueError, r"bias: got shape \(8,\), expected \(3,\) = \[N\]"),
        ((X, X[0], None, None, X), {}, ValueError, r"residual: got shape \(2, 3, 8\), expected \(2, 3, 3\) = \[..., N\]"),
        (
            (X, X[0], None, None, X[..., :3].astype(np.float16)),
            {},
            TypeError,
            "residual: got dtype float16, expected float32 as x",
        ),
        ((X, X[0]), {"activation": "tanh"}, ValueError, "activation: got 'tanh', expected None or one of silu, gelu"),
        ((X, X[0]), {"activation": "silu"}, ValueError, "weight: got 3 rows, expected an even number of them, gate and up"),
        (
            (X, X[0, :2], None, None, X),
            {"activation": "silu"},
            ValueError,
            r"residual: got .*, expected \(2, 3, 1\) = \[..., N / 2\]",
        ),
        ((X, X[0]), {"epsilon": -1.0}, ValueError, "epsilon: got -1.0, expected a value >= 0"),
        ((X, X[0]), {"scale_offset": 1.0}, ValueError, "scale_offset: got 1.0, expected 0 without norm_scale; pass norm_scale"),
    ],
    "newton_schulz": [
        ((EIGHT,), {}, ValueError, r"x: got shape \(8,\), expected \[..., M, N\]"),
        ((X[0],), {"dtype": "float16"}, ValueError, "dtype: got float16, expected bfloat16 or float32"),
        ((X[0],), {"steps": -1}, ValueError, "steps: got -1, expected at least 0"),
        ((X[0],), {"eps": -1.0}, ValueError, "eps: got -1.0, expected a value >= 0"),
        ((X[0],), {"coefficients": 3.0}, TypeError, r"coefficients: got float, expected a tuple \(a, b, c\)"),
        ((X[0],), {"coefficients": (1.5, -0.5)}, ValueError, r"coefficients: got .*, expected three numbers \(a, b, c\)"),
        ((X[0],), {"coefficients": ((1.5, -0.5, 0.0),), "steps": 2}, ValueError, "steps: got 2, expected 1, as many as"),
    ],
    "quantize_float8": [
        ((X[0, 0, 0],), {}, ValueError, r"x: got shape \(\), expected \[..., K\]"),
        ((X,), {"transposed": True}, ValueError, r"x: got shape .*, expected \[M, K\] with transposed=True"),
        ((X[0], EIGHT), {}, ValueError, r"scale: got shape \(8,\), expected one number"),
        ((X[0],), {"dtype": "int8"}, ValueError, "dtype: got int8, expected float8_e4m3fn or float8_e5m2"),
        ((X[0],), {"dtype": "float9"}, ValueError, "dtype: got 'float9', expected float8_e4m3fn or float8_e5m2"),
    ],
    "scaled_matmul": [
        ((X[0], N8, ONE, ONE), {}, TypeError, "lhs: got dtype float32, expected int8, float8_e4m3fn or float8_e5m2; divide it"),
        ((N8[0, 0], N8, ONE, ONE), {}, ValueError, r"lhs: got shape \(\), expected \[..., K\]"),
        (
            (N8, N8.astype(np.int8), ONE, ONE),
            {},
            TypeError,
            "rhs: got dtype int8, expected float8_e4m3fn or float8_e5m2 beside",
        ),
        ((N8.astype(np.int8), N8, ONE, ONE), {}, TypeError, "rhs: got dtype float8_e4m3fn, expected int8 beside lhs in int8"),
        ((N8, N8[0], ONE, ONE), {}, ValueError, r"rhs: got shape \(8,\) with 1 axes, expected 2 axes"),
        (
            (N8, N8[:3], ONE, ONE),
            {},
            ValueError,
            r"rhs: got .*expected \[K, N\] with K = 8 as in lhs; transpose_rhs=True reads",
        ),
        ((N8, N8, ONE, ONE), {"transpose_rhs": 0}, TypeError, "transpose_rhs: got 0, expected a bool"),
        (
            (N8, N8, X[0, :, 0], ONE),
            {},
            ValueError,
            r"lhs_scale: got shape \(3,\), expected \(8,\) = \[...\] of lhs, or one number",
        ),
        ((N8, N8, ONE, X[0]), {}, ValueError, r"rhs_scale: got shape \(3, 8\), expected \(8,\) = \[N\], or one number"),
        ((N8, N8, ONE, None), {}, TypeError, "rhs_scale: got NoneType, expected an array"),
        ((N8, N8, ONE, ONE), {"out_dtype": jnp.int8}, TypeError, "out_dtype: got dtype int8, expected float32, bfloat16"),
        ((N8, N8, ONE, ONE), {"out_dtype": "int9"}, TypeError, "out_dtype: got 'int9', expected float32, bfloat16 or float16"),
    ],
    "softmax": [
        ((X[0, 0, 0],), {}, ValueError, r"x: got shape \(\), expected at least one axis"),
        ((X,), {"axis": -4}, ValueError, r"axis: got -4, expected a value in \[-3, 2\]"),
        ((X,), {"axis": (1, -2)}, ValueError, r"axis: got \(1, -2\), expected one or more axes, each once"),
        ((X,), {"axis": ()}, ValueError, r"axis: got \(\), expected one or more axes"),
        ((X, X), {}, TypeError, "where: got dtype float32, expected bool; True marks"),
        ((X, X[:, :2] > 0), {}, ValueError, r"where: got shape \(2, 2, 8\), expected a shape that broadcasts to \(2, 3, 8\)"),
        ((X, X[None] > 0), {}, ValueError, r"where: got shape \(1, 2, 3, 8\), expected a shape that broadcasts"),
        ((X,), {"scale": float("inf")}, ValueError, "scale: got inf, expected a finite number"),
    ],
    "lightning_indexer": [
        ((Q, X, X[:, :, :4]), {"k": 1}, ValueError, r"weights: got shape \(2, 3, 4\), expected \(2, 5, 4\) = \[B,T,H\]"),
        ((Q, X[:1], Q[..., 0]), {"k": 1}, ValueError, r"key: got shape \(1, 3, 8\), expected \(2, 3, 8\) = \[B,S,D\]"),
        (
            (Q, X.astype(np.float16), Q[..., 0]),
            {"k": 1},
            TypeError,
            "key: got dtype float16, expected the query's dtype float32",
        ),
        ((Q, X, Q[..., 0]), {"k": 4}, ValueError, "k: got 4, expected at most 3 = S, the tokens of key"),
        ((Q, X, Q[..., 0]), {"k": -1}, ValueError, "k: got -1, expected at least 0"),
        ((Q, X, Q[..., 0]), {"k": 1, "causal": 1}, TypeError, "causal: got 1, expected True or False"),
        ((Q, X, Q[..., 0], None, X), {"k": 1}, ValueError, r"key_scale: got shape \(2, 3, 8\) with 3 axes, expected 2 axes"),
        ((Q, X, Q[..., 0], SLOTS[0, 0, 0]), {"k": 1}, ValueError, "kv_lens: got shape"),
        ((Q[..., :0], X[..., :0], Q[..., 0]), {"k": 1}, ValueError, r"query: got shape .*, expected at least one channel"),
        ((Q.astype(np.int8), X, Q[..., 0]), {"k": 1}, TypeError, "query: got dtype int8"),
    ],
    "native_sparse_selection": [
        (
            (Q, Q[:, :3, :3], Q[..., 0], OWN),
            {"count": 1},
            ValueError,
            "query: got 4 heads, expected a multiple of the 3 key heads",
        ),
        ((Q, Q[:1], Q[..., 0], OWN), {"count": 1}, ValueError, r"means: got shape .*, expected .* = \[B,N,K,D\]"),
        ((Q, Q.astype(np.float16), Q[..., 0], OWN), {"count": 1}, TypeError, "means: got dtype float16, expected the query's"),
        ((Q, Q, Q[:, :4, :, 0], OWN), {"count": 1}, ValueError, r"lse: got shape \(2, 4, 4\), expected .* = \[B,T,H\]"),
        ((Q, Q, Q[..., 0], OWN[:, :4]), {"count": 1}, ValueError, r"own_blocks: got shape \(1, 4\), expected \[1 or B,T\]"),
        ((Q, Q, Q[..., 0], OWN / 2), {"count": 1}, TypeError, "own_blocks: got dtype float64, expected integers"),
        ((Q, Q, Q[..., 0], OWN, OWN[0]), {"count": 1}, ValueError, r"first_blocks: got shape \(5,\) with 1 axes, expected 2"),
        ((Q, Q, Q[..., 0], OWN, None, SLOTS[..., 0][:1]), {"count": 1}, ValueError, "block_counts: got shape"),
        ((Q, Q, Q[..., 0], OWN), {"count": 6}, ValueError, "count: got 6, expected at most 5 = N, the blocks of means"),
        ((Q, Q, Q[..., 0], OWN), {"count": -1}, ValueError, "count: got -1, expected at least 0"),
        ((Q, Q, Q[..., 0], OWN), {"count": 1, "softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
    ],
    "sparse_latent_attention": [
        (
            (Q, X[:, :, :4], SLOTS[:, :, 0]),
            {},
            ValueError,
            r"key_value: got shape \(2, 3, 4\), expected \[2, S, 8\] as the query",
        ),
        ((Q, X[:1], SLOTS[:, :, 0]), {}, ValueError, r"key_value: got shape \(1, 3, 8\), expected \[2, S, 8\]"),
        ((Q, X.astype(np.float16), SLOTS[:, :, 0]), {}, TypeError, "key_value: got dtype float16, expected the query's dtype"),
        ((X, X, SLOTS[:, :, 0]), {}, ValueError, r"query: got shape \(2, 3, 8\) with 3 axes, expected 4 axes"),
        ((Q, X, SLOTS), {}, ValueError, r"token_indices: got shape \(2, 5, 4, 3\) with 4 axes, expected 3 axes"),
        ((Q, X, SLOTS[:, :4, 0]), {}, ValueError, r"token_indices: got shape \(2, 4, 3\), expected \[B,T,k\] with .*2, 5"),
        ((Q, X, SLOTS[:, :, 0]), {"value_size": 9}, ValueError, "value_size: got 9, expected at most 8"),
        ((Q, X, SLOTS[:, :, 0]), {"value_size": 0}, ValueError, "value_size: got 0, expected a value >= 1"),
    ],
}


@pytest.mark.parametrize(
    ("name", "args", "options", "error", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_refused(name: str, args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        get_operation(name).canonicalise(*args, **options)


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("delta_rule", {"query": Q[:1], "cu_seqlens": np.array([0, 6])}, r"cu_seqlens: got \[0 6\], expected .* at most 5"),
        (
            "grouped_matmul",
            {"lhs": X[0], "group_sizes": np.array([-1, 2])},
            r"group_sizes: got \[-1  2\], expected values >= 0",
        ),
        ("grouped_matmul", {"lhs": X[0], "group_sizes": np.array([2, 2])}, "a sum of at most 3 = rows of lhs"),
        ("linear_recurrence", {"query": Q[:1], "cu_seqlens": np.array([0, 6])}, "from 0 to at most 5 = length of query"),
        ("linear_recurrence", {"query": Q[:1], "cu_seqlens": np.array([1, 3])}, r"cu_seqlens: got \[1 3\], expected .* from 0"),
        ("mean_pooling", {"x": X[:1], "cu_seqlens": np.array([1, 3])}, r"cu_seqlens: got \[1 3\], expected .* from 0"),
        ("mean_pooling", {"x": X[:1], "cu_seqlens": np.array([0, 2, 1])}, "values that do not decrease"),
        ("mean_pooling", {"x": X[:1], "cu_seqlens": np.array([0, 4])}, "at most 3 = length of x"),
        ("native_sparse_attention", {"query": Q[:1], "cu_seqlens": np.array([0, 6])}, "from 0 to at most 5 = length of query"),
        ("native_sparse_attention", {"query": Q[:1], "cu_seqlens": np.array([0, 4, 3])}, r"cu_seqlens: got \[0 4 3\]"),
    ],
)
def test_refused_values(name: str, arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_operation(name).check_values(arrays)


@pytest.mark.parametrize("given", ["HIGHEST", "highest", jax.lax.Precision.HIGHEST])
@pytest.mark.parametrize(
    ("name", "args"),
    [("grouped_matmul", (X[0], np.ones((2, 8, 4), np.float32), G2)), ("linear_recurrence", QKV), ("cross_entropy", (X, ROWS))],
)
def test_spellings_of_a_precision(name: str, args: Any, given: Any) -> None:
    assert get_operation(name).canonicalise(*args, precision=given).call.precision == "highest"
