"""The entry point of `flash_attention`: what it refuses and how, and the call it makes of what it accepts."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.errors import EjkernelWarning
from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.dropout import seed_words
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.operations.flash_attention.pairs import count_pairs, visible
from ejkernel.utils import warn_once as _warn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Info:
    """Stands in for MaskInfo: the attributes that the operation reads."""

    dense: object = None
    query_segments: object = None
    key_segments: object = None
    query_positions: object = None
    key_positions: object = None
    query_lengths: object = None
    key_lengths: object = None
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    causal_offset: int = dataclasses.field(default=0, metadata={"static": True})
    window: object = dataclasses.field(default=None, metadata={"static": True})
    chunk_size: object = dataclasses.field(default=None, metadata={"static": True})
    prefix: object = dataclasses.field(default=None, metadata={"static": True})


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def arrays(queries=4, keys=4, heads=2, key_heads=2, batch=1, size=8, dtype=np.float32):
    return {
        "query": zeros(batch, queries, heads, size, dtype=dtype),
        "key": zeros(batch, keys, key_heads, size, dtype=dtype),
        "value": zeros(batch, keys, key_heads, size, dtype=dtype),
    }


def call_of(queries=4, keys=4, heads=2, key_heads=2, batch=1, **rest):
    return OPERATION.canonicalise(**arrays(queries, keys, heads, key_heads, batch), **rest).call


def seen(queries, keys, batch=1, heads=1, **rest):
    """The 0/1 matrix of batch 0, head 0."""
    bound = OPERATION.canonicalise(**arrays(queries, keys, heads, heads, batch), **rest)
    pairs = np.asarray(visible(bound.call, bound.inputs, jnp))
    return np.broadcast_to(pairs, (batch, heads, queries, keys)).astype(int)[0, 0].tolist()


POSITIONS = np.arange(4, dtype=np.int32)[None]

REFUSED = [
    # changed arguments, error, name, got, expected
    ({"query": zeros(4, 2, 8)}, ValueError, "query", "shape (4, 2, 8) with 3 axes", "4 axes"),
    ({"query": [1.0]}, TypeError, "query", "list", "an array"),
    ({"query": zeros(2, 4, 2, 8)}, ValueError, "key", "batch size 1", "the query's 2"),
    ({"query": zeros(1, 4, 3, 8)}, ValueError, "query", "3 heads", "a multiple of the 2 key heads"),
    ({"value": zeros(1, 4, 1, 8)}, ValueError, "value", "number of heads 1", "the key's 2"),
    ({"value": zeros(1, 5, 2, 8)}, ValueError, "value", "length 5", "the key's 4"),
    ({"key": zeros(1, 4, 2, 6)}, ValueError, "key", "head size 6", "the query's 8"),
    (
        {name: zeros(1, 4, 2, 8, dtype=np.float16 if name == "key" else jnp.bfloat16) for name in ("query", "key", "value")},
        TypeError,
        "key",
        "dtype float16",
        "the query's dtype bfloat16, or float32 in one of them; cast one of them",
    ),
    ({"value": zeros(1, 4, 2, 8, dtype=jnp.float8_e4m3fn)}, TypeError, "value", "dtype float8_e4m3fn", "the query's dtype float32"),
    ({"query": zeros(1, 4, 2, 8, dtype=np.int32)}, TypeError, "query", "dtype int32", "a floating type"),
    ({"value": zeros(1, 4, 2, 0)}, ValueError, "value", "head size 0", "at least 1"),
    ({"bias": zeros(3, 4)}, ValueError, "bias", "shape (3, 4)", "[T or 1, S or 1]"),
    ({"bias": zeros(2, 4, 4)}, ValueError, "bias", "shape (2, 4, 4)", "[B or 1, H or 1, T or 1, S or 1]"),
    ({"bias": zeros(1, 2, 4, 4, dtype=bool)}, TypeError, "bias", "dtype bool", "a floating type; a boolean mask"),
    ({"mask": zeros(1, 3, 4, 4, dtype=bool)}, ValueError, "mask", "shape (1, 3, 4, 4)", "(1, 2, 4, 4)"),
    ({"mask": zeros(4, 4, dtype=np.int32)}, TypeError, "mask", "dtype int32", "bool"),
    ({"softmax_aux": zeros(3)}, ValueError, "softmax_aux", "shape (3,)", "[H], [H, n] or [1, n] with H = 2"),
    ({"softmax_aux": zeros(3, 2)}, ValueError, "softmax_aux", "shape (3, 2)", "[H], [H, n] or [1, n]"),
    ({"softmax_aux": zeros(1, 2, 1)}, ValueError, "softmax_aux", "shape (1, 2, 1)", "[H], [H, n] or [1, n]"),
    ({"softmax_aux": zeros(2, dtype=np.int32)}, TypeError, "softmax_aux", "dtype int32", "a floating type"),
    ({"sliding_window": -1}, ValueError, "sliding_window", "-1", "a value >= 0"),
    ({"sliding_window": (2, -3)}, ValueError, "sliding_window", "-3", "a value >= 0"),
    ({"sliding_window": 2.0}, TypeError, "sliding_window", "2.0", "an int"),
    ({"sliding_window": True}, TypeError, "sliding_window", "True", "an int"),
    ({"sliding_window": (1, 2, 3)}, ValueError, "sliding_window", "(1, 2, 3)", "a pair (left, right)"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap", "0.0", "a value > 0"),
    ({"logits_soft_cap": -2}, ValueError, "logits_soft_cap", "-2", "a value > 0"),
    ({"softmax_scale": "auto"}, TypeError, "softmax_scale", "'auto'", "a number"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale", "nan", "a finite number"),
    ({"dropout_prob": 1.0}, ValueError, "dropout_prob", "1.0", "[0, 1)"),
    ({"dropout_prob": -0.1}, ValueError, "dropout_prob", "-0.1", "[0, 1)"),
    ({"dropout_prob": 0.5, "dropout_seed": 1.5}, TypeError, "dropout_seed", "1.5", "an int"),
    ({"dropout_prob": 0.5, "dropout_seed": -1}, ValueError, "dropout_seed", "-1", "[0, 2**64)"),
    ({"dropout_prob": 0.5, "dropout_seed": zeros(3, dtype=np.uint32)}, ValueError, "dropout_seed", "(3,)", "uint32[2]"),
    ({"dropout_prob": 0.5, "dropout_seed": zeros(2)}, TypeError, "dropout_seed", "dtype float32", "an integer type"),
    (
        {"dropout_prob": 0.5, "dropout_streams": zeros(1, 2, 1, dtype=np.uint32)},
        ValueError, "dropout_streams", "(1, 2, 1)", "(1, 2, 2)",
    ),
    ({"causal": 1}, TypeError, "causal", "1", "True or False"),
    ({"causal": True, "causal_alignment": "left"}, ValueError, "causal_alignment", "'left'", "top_left, bottom_right"),
    ({"causal_alignment": "bottom_right"}, ValueError, "causal_alignment", "'bottom_right'", "None without causal=True"),
    (
        {"causal": True, "causal_alignment": "bottom_right", "mask_info": Info(query_positions=POSITIONS)},
        ValueError, "causal_alignment", "'bottom_right'", "None when mask_info holds positions",
    ),
    (
        {"causal_alignment": "top_left", "mask_info": Info(causal=True, causal_offset=3)},
        ValueError, "causal_alignment", "'top_left'", "None when mask_info has causal_offset 3",
    ),
    ({"chunk_size": 0}, ValueError, "chunk_size", "0", "a value >= 1"),
    (
        {"chunk_size": 4, "mask_info": Info(chunk_size=8)},
        ValueError, "chunk_size", "4 as an argument and 8 in mask_info", "one value",
    ),
    ({"prefix": -1, "causal": True}, ValueError, "prefix", "-1", "a value >= 0"),
    ({"normalize_output": "no"}, TypeError, "normalize_output", "'no'", "True or False"),
    ({"logits_dtype": "int8"}, ValueError, "logits_dtype", "int8", "one of bfloat16, float16, float32, float64"),
    ({"logits_dtype": "float33"}, ValueError, "logits_dtype", "'float33'", "one of bfloat16"),
    ({"logits_dtype": np.float64}, ValueError, "logits_dtype", "float64", "at most float32 for float32 inputs"),
    ({"precision": "best"}, ValueError, "precision", "'best'", "default, high, highest"),
    ({"precision": 3}, TypeError, "precision", "3", "None, a jax.lax.Precision or its name"),
    ({"mask_info": zeros(4, 4, dtype=bool)}, TypeError, "mask_info", "an array", "a MaskInfo; wrap a boolean mask"),
    ({"query_segments": zeros(1, 5, dtype=np.int32)}, ValueError, "query_segments", "shape (1, 5)", "(1, 4)"),
    ({"key_segments": zeros(1, 4)}, TypeError, "key_segments", "dtype float32", "an integer type"),
    ({"key_lengths": zeros(3, dtype=np.int32)}, ValueError, "key_lengths", "shape (3,)", "(1,)"),
    (
        {"query_positions": POSITIONS, "mask_info": Info(query_positions=POSITIONS)},
        ValueError, "mask_info", "query positions that are given a second time", "one source only",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "name", "got", "expected"), REFUSED, ids=lambda value: None)
def test_refusals_name_argument_got_and_expected(change, error, name, got, expected):
    with pytest.raises(error) as caught:
        OPERATION.canonicalise(**{**arrays(), **change})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{name}: got ")
    assert got in message
    assert expected in message


@pytest.mark.parametrize("name", ["logits_soft_cap", "dropout_prob"])
def test_traced_numbers_are_refused_by_name(name):
    with pytest.raises(TypeError, match=f"{name}: got a traced value"):
        jax.jit(lambda x: OPERATION.canonicalise(**arrays(), **{name: x}).inputs.query)(0.5)


def test_concrete_lengths_are_checked_before_anything_runs():
    given = {**arrays(), "key_lengths": np.array([5])}
    with pytest.raises(ValueError, match=r"key_lengths: got \[5\], expected values in \[0, 4\]"):
        OPERATION.check_values(given)
    OPERATION.check_values({**given, "key_lengths": jax.ShapeDtypeStruct((1,), np.int32)})


def test_defaults():
    call = call_of()
    assert call.softmax_scale == pytest.approx(8**-0.5, rel=1e-15)
    assert call.window is None
    assert call.precision is None
    assert (call.logits_dtype, call.normalize_output, call.return_lse, call.dropout_rate) == ("float32", True, False, 0.0)
    assert hash(call) == hash(call_of())


def test_float64_keeps_float64_logits():
    with jax.enable_x64(True):
        assert OPERATION.canonicalise(**arrays(dtype=np.float64), logits_dtype=jnp.float32).call.logits_dtype == "float64"


@pytest.mark.parametrize(
    ("given", "canonical"),
    [(None, None), ("HIGH", "high"), (jax.lax.Precision.HIGHEST, "highest"), (jax.lax.Precision.DEFAULT, "default")],
)
def test_precision_names(given, canonical):
    assert call_of(precision=given).precision == canonical


@pytest.mark.parametrize(("shape", "canonical"), [((2,), (1, 2, 1)), ((2, 3), (1, 2, 3)), ((1, 3), (1, 2, 3)), ((2, 0), None)])
def test_sinks_shapes(shape, canonical):
    sinks = OPERATION.canonicalise(**arrays(), softmax_aux=zeros(*shape)).inputs.softmax_aux
    assert (sinks is None) if canonical is None else sinks.shape == canonical


def test_shared_sinks_reach_every_head():
    given = np.array([[1.0, 2.0]], np.float32)
    sinks = OPERATION.canonicalise(**arrays(), softmax_aux=given).inputs.softmax_aux
    np.testing.assert_array_equal(sinks, [[[1, 2], [1, 2]]])


def test_what_has_no_effect_leaves_no_trace():
    plain = call_of()
    assert call_of(sliding_window=(None, None)) == plain
    assert call_of(prefix=3) == plain
    assert call_of(query_positions=POSITIONS, key_positions=POSITIONS) == plain
    assert call_of(mask_info=Info(causal_offset=2)) == plain
    assert call_of(dropout_seed=3) == plain
    assert call_of(causal=True, sliding_window=3).window == (3, None)
    assert call_of(causal=True, sliding_window=3, prefix=2).window == (3, 3)


def test_alignment_is_an_offset():
    assert call_of(3, 7, causal=True).query_offset == 0
    assert call_of(3, 7, causal=True, causal_alignment="bottom_right").query_offset == 4
    assert call_of(7, 3, causal_alignment="bottom_right", mask_info=Info(causal=True)).query_offset == -4


# Which pairs are visible


def test_causal_top_left_and_bottom_right():
    assert seen(2, 4, causal=True) == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert seen(2, 4, causal=True, causal_alignment="bottom_right") == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen(3, 2, causal=True, causal_alignment="bottom_right") == [[0, 0], [1, 0], [1, 1]]


def test_windows_are_inclusive_and_an_int_means_both_sides():
    assert seen(4, 4, sliding_window=1) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert seen(3, 4, sliding_window=(0, 2)) == [[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert seen(3, 3, sliding_window=(None, 0)) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_chunks_and_prefix():
    assert seen(4, 4, chunk_size=2) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert seen(3, 3, causal=True, prefix=2) == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert seen(3, 3, causal=True, prefix=3, sliding_window=(1, 1)) == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


def test_everything_said_holds_at_once():
    info = Info(
        dense=np.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1]], bool)[None, None],
        query_segments=np.array([[0, 0, 0, 1]], np.int32),
        key_segments=np.array([[0, 0, 0, 1]], np.int32),
    )
    bias = zeros(1, 1, 4, 4)
    assert seen(4, 4, mask_info=info, bias=bias, causal=True) == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    masked = np.array([[1, 1, 0, 1]], bool)
    assert seen(4, 4, mask_info=info, mask=masked, causal=True) == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]


def test_windows_of_mask_and_argument_intersect():
    info = Info(window=(3, None))
    assert call_of(mask_info=info, sliding_window=(None, 1)).window == (3, 1)
    assert call_of(mask_info=info, sliding_window=2).window == (2, 2)
    assert call_of(mask_info=Info(window=(1, 5)), sliding_window=(4, 2)).window == (1, 2)


def test_a_prefix_exempts_from_its_own_causal_mask_only():
    info = Info(causal=True, prefix=2)
    assert seen(2, 2, mask_info=info) == [[1, 1], [1, 1]]
    assert seen(2, 2, mask_info=info, causal=True) == [[1, 0], [1, 1]]
    assert call_of(causal=True, prefix=3, mask_info=info).prefix == 2


def test_lengths_are_padding_and_the_shorter_counts():
    assert seen(3, 3, key_lengths=np.array([2]), query_lengths=np.array([2])) == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    info = Info(key_lengths=np.array([1], np.int32))
    assert seen(2, 3, key_lengths=np.array([2]), mask_info=info) == [[1, 0, 0], [1, 0, 0]]


def test_padding_sees_and_is_seen_by_nothing():
    ids = np.array([[-1, 0, -1]], np.int32)
    assert seen(3, 3, query_segments=ids, key_segments=ids) == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    cut = seen(3, 3, query_segments=np.array([[0, 1, 1]]), key_segments=np.array([[0, 1, 1]]), key_lengths=np.array([2]))
    assert cut == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]


def test_segments_of_one_side_only_mark_its_padding():
    assert seen(2, 3, key_segments=np.array([[3, -1, 5]])) == [[1, 0, 1], [1, 0, 1]]
    assert seen(2, 3, query_segments=np.array([[7, -2]])) == [[1, 1, 1], [0, 0, 0]]


def test_positions_replace_indices_and_an_offset_moves_them():
    queries = np.array([[2, 0]], np.int32)
    assert seen(2, 3, causal=True, query_positions=queries) == [[1, 1, 1], [1, 0, 0]]
    info = Info(query_positions=queries, causal_offset=-1)
    assert seen(2, 3, causal=True, mask_info=info) == [[1, 1, 0], [0, 0, 0]]
    assert seen(2, 3, causal=True, key_positions=np.array([[5, 1, 0]])) == [[0, 0, 1], [0, 1, 1]]


def test_offset_of_the_mask_holds_for_arguments_too():
    assert seen(2, 4, causal=True, mask_info=Info(causal_offset=2)) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen(2, 4, sliding_window=(0, 0), mask_info=Info(causal_offset=2)) == [[0, 0, 1, 0], [0, 0, 0, 1]]


# Dropout


def test_streams_of_every_kind_of_seed():
    words = {
        "int": (5, [5, 0]),
        "wide": (2**32 + 7, [7, 1]),
        "scalar": (jnp.uint32(5), [5, 0]),
        "raw": (np.array([3, 9], np.uint32), [3, 9]),
        "typed": (jax.random.key(6, impl="threefry2x32"), [0, 6]),
    }
    for seed, expected in words.values():
        np.testing.assert_array_equal(seed_words(seed), expected)
    assert len({tuple(np.asarray(seed_words(jax.random.key(seed, impl="rbg"))).tolist()) for seed in range(8)}) == 8


def test_streams_shape_and_rule():
    streams = OPERATION.canonicalise(**arrays(heads=4, batch=3), dropout_prob=0.5, dropout_seed=5).inputs.dropout_streams
    assert streams.shape == (3, 4, 2)
    assert streams.dtype == np.uint32
    np.testing.assert_array_equal(streams, dropout.streams(np.array([5, 0], np.uint32), 3, 4))
    assert len({tuple(pair) for pair in np.asarray(streams).reshape(-1, 2).tolist()}) == 12


def test_streams_may_be_given_for_a_shard():
    whole = np.asarray(dropout.streams(np.array([5, 0], np.uint32), 1, 4))
    given = OPERATION.canonicalise(**arrays(), dropout_prob=0.5, dropout_streams=whole[:, 2:]).inputs.dropout_streams
    np.testing.assert_array_equal(given, whole[:, 2:])


def test_dropped_share_matches_the_rate():
    streams = np.asarray(dropout.streams(np.array([1, 2], np.uint32), 2, 2))
    rows, columns = np.arange(128, dtype=np.uint32)[:, None], np.arange(128, dtype=np.uint32)
    first, second = np.moveaxis(streams, -1, 0)[..., None, None]
    dropped = dropout.bits(first, second, rows, columns) < dropout.threshold(0.3)
    assert abs(dropped.mean() - 0.3) < 0.01
    assert abs(dropped.mean((0, 1)).std() - np.sqrt(0.3 * 0.7 / 4)) < 0.02
    assert abs((dropped[0, 0] & dropped[1, 1]).mean() - 0.09) < 0.012


def test_missing_seed_warns_once(monkeypatch):
    monkeypatch.setattr(_warn, "_said", set())
    with pytest.warns(EjkernelWarning, match="drops the same entries at every call"):
        streams = OPERATION.canonicalise(**arrays(), dropout_prob=0.5).inputs.dropout_streams
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = OPERATION.canonicalise(**arrays(), dropout_prob=0.5).inputs.dropout_streams
    np.testing.assert_array_equal(streams, again)
    np.testing.assert_array_equal(streams, dropout.streams(np.zeros(2, np.uint32), 1, 2))


# Cost


COUNTED = [
    {"causal": True},
    {"causal": True, "causal_alignment": "bottom_right"},
    {"causal": True, "sliding_window": 3},
    {"sliding_window": (2, 1)},
    {"sliding_window": (None, 2)},
    {"chunk_size": 4},
    {"chunk_size": 3, "causal": True, "sliding_window": (1, 0)},
    {"causal": True, "prefix": 5},
    {"causal": True, "prefix": 5, "sliding_window": (3, 2)},
    {},
]


@pytest.mark.parametrize("options", COUNTED, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (13, 6), (5, 14), (0, 3), (3, 0)])
def test_cost_counts_visible_pairs_exactly(options, queries, keys):
    bound = OPERATION.canonicalise(**arrays(queries, keys), **options)
    pairs = np.asarray(visible(bound.call, bound.inputs, np)).sum()
    assert count_pairs(bound.call) == pairs
    assert OPERATION.cost(bound.call, "forward").flops == 2 * 2 * pairs * 16
    assert OPERATION.cost(bound.call, "backward").flops == 5 * OPERATION.cost(bound.call, "forward").flops // 2


def test_cost_of_bytes():
    call = call_of(return_lse=True)
    tensor, lse = 4 * 2 * 8 * 4, 4 * 2 * 4
    assert OPERATION.cost(call, "forward").bytes == 4 * tensor + lse
    assert OPERATION.cost(call, "backward").bytes == 3 * tensor + 2 * (tensor + lse) + 3 * tensor
