"""Attention that users program: `score_mod`, `mask_mod`, and the position biases that have a name."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import ejkernel
from ejkernel.call.policy import use
from ejkernel.operations.flash_attention.score_functions.bounds import static_tiles
from ejkernel.operations.flash_attention.score_functions.tracing import Tracing

BATCH, HEADS, KEY_HEADS, TOKENS, SIZE = 4, 4, 2, 37, 8
RNG = np.random.default_rng(0)
QUERY = jnp.asarray(RNG.standard_normal((BATCH, TOKENS, HEADS, SIZE)), jnp.float32)
KEY, VALUE = (jnp.asarray(RNG.standard_normal((BATCH, TOKENS, KEY_HEADS, SIZE)), jnp.float32) for _ in range(2))
SLOPES = jnp.asarray(RNG.random(HEADS), jnp.float32)
GATES = jnp.asarray(-RNG.random((BATCH, HEADS, TOKENS)), jnp.float32)
TABLE = jnp.asarray(RNG.standard_normal((HEADS, 8)), jnp.float32)
ROWS, COLUMNS = jnp.arange(TOKENS)[:, None], jnp.arange(TOKENS)[None]
DOCUMENTS = jnp.asarray(np.sort(RNG.integers(0, 4, (BATCH, TOKENS)), axis=1), jnp.int32)
DISTANCES = jnp.clip(jnp.abs(ROWS - COLUMNS), 0, 7)
SMALL_TILES = {"block_q": 16, "block_k": 8, "block_q_backward": 8, "block_k_backward": 16}

Attend = Callable[..., Any]


@pytest.fixture(autouse=True)
def as_users_write() -> Iterator[None]:
    """Functions that mix integers and floats."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def plain(query: Any, key: Any, value: Any, change: Callable[[Any], Any], visible: Any) -> Any:
    """Attention as one writes it, with a change of the whole `[B, H, T, S]` scores."""
    key, value = (jnp.repeat(array, HEADS // KEY_HEADS, axis=2) for array in (key, value))
    scores = change(jnp.einsum("bthd,bshd->bhts", query, key, precision="highest") / SIZE**0.5)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest")


CAUSAL = ROWS >= COLUMNS
EVERY = jnp.ones((TOKENS, TOKENS), bool)
PROGRAMS: dict[str, tuple[Any, Attend, Attend]] = {
    "alibi by hand": (
        SLOPES,
        lambda q, k, v, a: ejkernel.flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - a[h] * abs(i - j)),
        lambda q, k, v, a: plain(q, k, v, lambda s: s - a[:, None, None] * abs(ROWS - COLUMNS), EVERY),
    ),
    "alibi": (
        SLOPES,
        lambda q, k, v, a: ejkernel.flash_attention(q, k, v, alibi_slopes=a, causal=True, cfg=SMALL_TILES),
        lambda q, k, v, a: plain(q, k, v, lambda s: s - a[:, None, None] * abs(ROWS - COLUMNS), CAUSAL),
    ),
    "forget gates": (
        GATES,
        lambda q, k, v, a: ejkernel.flash_attention(q, k, v, forget_gate=a, causal=True, cfg=SMALL_TILES),
        lambda q, k, v, a: plain(
            q, k, v, lambda s: s + jnp.cumsum(a, -1)[..., :, None] - jnp.cumsum(a, -1)[..., None, :], CAUSAL
        ),
    ),
    "inputs": (
        {"table": TABLE, "power": jnp.float32(0.7)},
        lambda q, k, v, a: ejkernel.flash_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j, given: given["power"] * s + given["table"][h, jnp.clip(abs(i - j), 0, 7)],
            mod_inputs=a,
            sliding_window=(9, 4),
            cfg=SMALL_TILES,
        ),
        lambda q, k, v, a: plain(
            q,
            k,
            v,
            lambda s: a["power"] * s + a["table"][:, DISTANCES],
            (ROWS - COLUMNS <= 9) & (COLUMNS - ROWS <= 4),
        ),
    ),
    "documents": (
        SLOPES,
        lambda q, k, v, a: ejkernel.flash_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: 5 * jnp.tanh(s * a[h] / 5),
            mask_mod=lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j],
            causal=True,
        ),
        lambda q, k, v, a: plain(
            q,
            k,
            v,
            lambda s: 5 * jnp.tanh(s * a[:, None, None] / 5),
            CAUSAL & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]),
        ),
    ),
}


def value_and_gradients(attend: Attend) -> Attend:
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(QUERY.shape), jnp.float32)

    def loss(query: Any, key: Any, value: Any, arrays: Any) -> Any:
        return jnp.sum(attend(query, key, value, arrays) * weights[: query.shape[0]])

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))


def assert_equal(got: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * float(jnp.max(jnp.abs(other))) + 1e-6, rtol=0)


@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_what_one_writes(program: str) -> None:
    """Values and the gradients of everything, captured arrays included, eagerly, under jit, and over a mapped axis of arrays."""
    arrays, ours, by_hand = PROGRAMS[program]
    expected = value_and_gradients(by_hand)(QUERY, KEY, VALUE, arrays)
    assert_equal(value_and_gradients(ours)(QUERY, KEY, VALUE, arrays), expected)
    assert_equal(jax.jit(value_and_gradients(ours))(QUERY, KEY, VALUE, arrays), expected)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5]), arrays)
    mapped = jax.vmap(value_and_gradients(ours), in_axes=(None, None, None, 0))(QUERY, KEY, VALUE, several)
    half = value_and_gradients(by_hand)(QUERY, KEY, VALUE, jax.tree.map(lambda leaf: leaf * 0.5, arrays))
    assert_equal(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), expected, half))


@pytest.mark.parametrize("program", PROGRAMS)
def test_differentiates_twice_in_plain_jax(program: str) -> None:
    """`custom_gradients=False` differentiates through the function as through everything else."""
    arrays, ours, by_hand = PROGRAMS[program]

    def squared(attend: Attend) -> Any:
        gradient = value_and_gradients(attend)
        return jax.grad(lambda value: jnp.sum(gradient(QUERY, KEY, value, arrays)[1][0] ** 2))(VALUE)

    with use("xla", custom_gradients=False):
        got = squared(ours)
    assert_equal(got, squared(by_hand))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("spec", [("data", "model"), (None, "model"), ("data", None)])
def test_parts_of_a_problem_know_their_place(program: str, spec: tuple[str | None, str | None]) -> None:
    """Over a mesh, and over arrays that are split already, rows and heads are told by their places in the whole problem."""
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    arrays, ours, by_hand = PROGRAMS[program]
    expected = value_and_gradients(by_hand)(QUERY, KEY, VALUE, arrays)
    part = PartitionSpec(spec[0], None, spec[1], None)
    placed = [jax.device_put(array, jax.sharding.NamedSharding(mesh, part)) for array in (QUERY, KEY, VALUE)]
    assert_equal(jax.jit(value_and_gradients(ours))(*placed, arrays), expected)


def test_over_a_mesh() -> None:
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    part = PartitionSpec("data", None, "model", None)

    def attend(query: Any, key: Any, value: Any, gates: Any) -> Any:
        return ejkernel.flash_attention(
            query,
            key,
            value,
            score_mod=lambda s, b, h, i, j: s + gates[b, h, j] * (b + 2 * h),
            alibi_slopes=SLOPES,
            mask_mod=lambda b, h, i, j: (i + j + b) % 3 != h,
            mesh=mesh,
            in_specs=(part, part, part),
            out_specs=part,
        )

    def by_hand(query: Any, key: Any, value: Any, gates: Any) -> Any:
        b, h = jnp.arange(BATCH)[:, None, None, None], jnp.arange(HEADS)[:, None, None]
        slopes = SLOPES[:, None, None] * abs(ROWS - COLUMNS)
        return plain(query, key, value, lambda s: s + gates[:, :, None] * (b + 2 * h) - slopes, (ROWS + COLUMNS + b) % 3 != h)

    expected = value_and_gradients(by_hand)(QUERY, KEY, VALUE, GATES)
    assert_equal(value_and_gradients(attend)(QUERY, KEY, VALUE, GATES), expected)


def test_packed_sequences() -> None:
    """Indices are those of the packed tokens; distances of ALiBi are the same within a sequence."""
    lengths = jnp.array([0, 9, 9, TOKENS], jnp.int32)
    query, key, value = (array[:1] for array in (QUERY, KEY, VALUE))
    got = ejkernel.flash_attention(query, key, value, cum_seqlens_q=lengths, alibi_slopes=SLOPES, causal=True)
    by_mod = ejkernel.flash_attention(
        query, key, value, cum_seqlens_q=lengths, score_mod=lambda s, b, h, i, j: s - SLOPES[h] * (i - j), causal=True
    )
    parts = [
        ejkernel.flash_attention(*(x[:, start:stop] for x in (query, key, value)), alibi_slopes=SLOPES, causal=True)
        for start, stop in itertools.pairwise((0, 9, TOKENS))
    ]
    assert_equal(got, jnp.concatenate(parts, axis=1))
    assert_equal(by_mod, got)


def test_a_hidden_pair_may_be_anything() -> None:
    """What no query sees stays unseen: NaN in captured arrays, values and derivatives that are NaN, a score of minus infinity."""
    gates = GATES.at[:, :, 30:].set(jnp.nan)

    def ours(query: Any, key: Any, value: Any, given: Any) -> Any:
        later = jnp.concatenate([given, gates[..., 30:]], axis=-1)
        return ejkernel.flash_attention(
            query,
            key,
            value,
            score_mod=lambda s, b, h, i, j: jnp.where(
                (i + j) % 5 == 0, -jnp.inf, s + later[b, h, j] * jnp.log((i - j).astype(jnp.float32) + 1)
            ),
            mask_mod=lambda b, h, i, j: j < 30,
            causal=True,
            cfg=SMALL_TILES,
        )

    def by_hand(query: Any, key: Any, value: Any, given: Any) -> Any:
        later = jnp.concatenate([given, jnp.zeros_like(gates[..., 30:])], axis=-1)
        logs = jnp.log(jnp.maximum(ROWS - COLUMNS, 0) + 1.0)
        visible = CAUSAL & (COLUMNS < 30) & ((ROWS + COLUMNS) % 5 != 0)
        safe = jnp.where(visible.any(-1, keepdims=True), visible, True)
        found = plain(query, key, value, lambda s: s + later[:, :, None] * logs, safe)
        return jnp.where(visible.any(-1)[None, :, None, None], found, 0)

    given = GATES[..., :30]
    assert_equal(value_and_gradients(ours)(QUERY, KEY, VALUE, given), value_and_gradients(by_hand)(QUERY, KEY, VALUE, given))


def test_gradients_of_captured_arrays_are_not_rounded_one_by_one() -> None:
    """In bfloat16 they are sums of what cancels, over a thousand tokens."""
    rng = np.random.default_rng(2)
    arrays = [jnp.asarray(rng.standard_normal((1, 1024, 2, 16)), jnp.bfloat16) for _ in range(4)]
    gates = jnp.asarray(-np.log1p(np.exp(rng.standard_normal((1, 2, 1024)) - 4)), jnp.float32)
    slopes = jnp.array([0.1, 0.01], jnp.bfloat16)

    def gradients(query: Any, key: Any, value: Any, weights: Any) -> Any:
        def loss(gates: Any, slopes: Any) -> Any:
            out = ejkernel.flash_attention(query, key, value, forget_gate=gates, alibi_slopes=slopes, causal=True)
            return jnp.sum(out.astype(jnp.float32) * weights.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1))(gates, slopes)

    got = gradients(*arrays)
    expected = gradients(*(array.astype(jnp.float32) for array in arrays))
    np.testing.assert_allclose(got[0], expected[0], rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(expected[0]))))
    np.testing.assert_allclose(got[1].astype(jnp.float32), expected[1].astype(jnp.float32), rtol=1e-2)


def test_equal_programs_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """A lambda is a new object in every call; what it computes is not."""

    def attend(slopes: Any, power: Any) -> Any:
        return ejkernel.flash_attention(QUERY, KEY, VALUE, score_mod=lambda s, b, h, i, j: power * s - slopes[h] * abs(i - j))

    attend(SLOPES, jnp.float32(1.0))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        attend(SLOPES * 2, jnp.float32(0.5))
    assert [record.message for record in caplog.records if "_invoke" in record.message] == []


def traced(function: Callable[..., Any], *, masks: bool = False) -> Any:
    return Tracing(jnp.float32).traced("mask_mod" if masks else "score_mod", function, None, masks=masks)


def test_equality_is_what_is_computed() -> None:
    """Gradients included: two functions with the same values and other rules are not the same."""

    def with_rule(factor: float) -> Callable[[Any], Any]:
        @jax.custom_jvp
        def doubled(x: Any) -> Any:
            return x * 2

        doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * factor))
        return doubled

    def applying(factor: float) -> Any:
        rule = with_rule(factor)
        return traced(lambda s, b, h, i, j: rule(s))

    assert traced(lambda s, b, h, i, j: s + 1) == traced(lambda s, *rest: s + 1)
    assert traced(lambda s, b, h, i, j: s + 1) != traced(lambda s, b, h, i, j: s + 2)
    assert traced(lambda s, b, h, i, j: s + 0.0) != traced(lambda s, b, h, i, j: s - 0.0)
    first, second, again = map(applying, (2.0, 3.0, 2.0))
    assert first != second
    assert first == again and hash(first) == hash(again)


def test_what_it_is_told_is_what_it_reads() -> None:
    """Text without what no score needs: negative indices, tables that are computed beforehand, things computed twice."""
    function = traced(lambda s, b, h, i, j: s * jnp.exp2(-jnp.arange(1, 9.0))[h] + (i - j) * (i - j))
    assert [node.primitive for node in function.nodes] == [
        "dynamic_slice",
        "squeeze",
        "mul",
        "sub",
        "mul",
        "convert_element_type",
        "add",
    ]
    assert function.scalars == {"score", "head", "query", "key"}
    assert traced(lambda b, h, i, j: (i >= j) & (i - j < 5), masks=True).captures == ()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a branch": (
        {"score_mod": lambda s, b, h, i, j: s if i > j else -s},
        TypeError,
        "score_mod: got a function that branches on the score or on an index, expected one without",
    ),
    "a side effect": (
        {"score_mod": lambda s, b, h, i, j: (jax.debug.print("{}", s), s)[1]},
        ValueError,
        "score_mod: got a function with side effects",
    ),
    "another shape": (
        {"score_mod": lambda s, b, h, i, j: jnp.stack([s, s])},
        ValueError,
        r"score_mod: got a function that returns float32\[2\], expected one float32 scalar",
    ),
    "another dtype": (
        {"score_mod": lambda s, b, h, i, j: s.astype(jnp.bfloat16)},
        ValueError,
        r"score_mod: got a function that returns bfloat16\[\], expected one float32 scalar",
    ),
    "no bool": (
        {"mask_mod": lambda b, h, i, j: i - j},
        ValueError,
        r"mask_mod: got a function that returns int32\[\], expected one bool scalar",
    ),
    "other arguments": (
        {"mask_mod": lambda i, j: i >= j},
        TypeError,
        r"mask_mod: got a function of other arguments .*batch, head, query index, key index",
    ),
    "an array of NumPy": (
        {"score_mod": lambda s, b, h, i, j: s + np.ones(HEADS, np.float32)[h]},
        TypeError,
        "score_mod: got a function that takes elements of a NumPy array by a traced index",
    ),
    "no function": ({"score_mod": 3}, TypeError, "score_mod: got int, expected a function"),
    "inputs of nothing": ({"mod_inputs": SLOPES}, ValueError, "mod_inputs: got arrays, expected None without score_mod"),
    "complex numbers": (
        {"score_mod": lambda s, b, h, i, j: s + jnp.abs(jnp.ones(HEADS, jnp.complex64)[h])},
        TypeError,
        "score_mod: got a function that reads an array of dtype complex64",
    ),
    "slopes of other heads": ({"alibi_slopes": SLOPES[:3]}, ValueError, r"alibi_slopes: got shape \(3,\), expected \[H\]"),
    "gates without time": ({"forget_gate": GATES}, ValueError, "forget_gate: got causal=False .* expected causal attention"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_named(mistake: str) -> None:
    options, error, message = WRONG[mistake]
    with pytest.raises(error, match=message):
        ejkernel.flash_attention(QUERY, KEY, VALUE, **options)


def test_an_array_of_a_trace_that_has_ended() -> None:
    kept: list[Any] = []
    jax.jit(lambda slopes: kept.append(slopes) or slopes)(SLOPES)
    with pytest.raises(
        TypeError, match=r"score_mod: got a function that reads a tracer of a trace that has ended.*mod_inputs="
    ):
        ejkernel.flash_attention(QUERY, KEY, VALUE, score_mod=lambda s, b, h, i, j: s + kept[0][h])


def test_exports_and_explains() -> None:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return ejkernel.flash_attention(query, key, value, alibi_slopes=SLOPES, causal=True)

    exported = jax.export.export(jax.jit(attend))(QUERY, KEY, VALUE)
    assert_equal(exported.call(QUERY, KEY, VALUE), attend(QUERY, KEY, VALUE))
    told = ejkernel.explain(ejkernel.flash_attention, QUERY, KEY, VALUE, alibi_slopes=SLOPES)
    assert told.forward.chosen is not None and told.forward.chosen.id == "xla"
    reasons = " ".join(reason for verdict in told.forward.verdicts for reason in verdict.reasons)
    assert "does not accept score_mod" in reasons or len(told.forward.verdicts) == 1
    assert "mod_values" not in reasons


MASKS: dict[str, tuple[Callable[..., Any], float]] = {
    "causal": (lambda b, h, i, j: i >= j, 0.45),
    "window": (lambda b, h, i, j: (i >= j) & (i - j < 20), 0.75),
    "prefix": (lambda b, h, i, j: (i >= j) | (j < 30), 0.3),
    "dilated window": (lambda b, h, i, j: (abs(i - j) < 40) & ((i - j) % 3 == 0), 0.4),
    "chunks": (lambda b, h, i, j: i // 32 == j // 32, 0.7),
    "neighbours": (lambda b, h, i, j: (abs(i // 16 - j // 16) <= 1) & (abs(i % 16 - j % 16) <= 1), 0.5),
    "by head": (lambda b, h, i, j: jnp.where(h < 2, i >= j, i - j < 10), 0.0),
    "stripes": (lambda b, h, i, j: ~((i + j) // 50 % 2 == 1), 0.1),
    "negative": (lambda b, h, i, j: (j - i) // 16 == -2, 0.6),
    "squares": (lambda b, h, i, j: i * i >= j * 30, 0.1),
    "floats": (lambda b, h, i, j: i * 0.5 >= j, 0.0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_tiles_that_a_mask_empties(mask: str) -> None:
    """None that holds a visible pair counts as empty, none with a hidden one as full; most that are empty are found."""
    function, least = MASKS[mask]
    length, block = 128, 8
    seen = traced(function, masks=True)
    index = np.arange(length)
    pairs = np.stack([np.asarray(function(0, head, index[:, None], index[None])) for head in range(HEADS)])
    tiles = pairs.reshape(HEADS, length // block, block, length // block, block)
    start = np.arange(0, length, block)
    found = static_tiles(seen, (start[:, None], start[:, None] + block - 1), (start[None], start[None] + block - 1))
    assert found is not None
    some, every = (np.broadcast_to(tile, tiles.shape[1:4:2]) for tile in found)
    assert not np.any(tiles.any(axis=(0, 2, 4)) & ~some)
    assert not np.any(every & ~tiles.all(axis=(0, 2, 4)))
    assert np.mean(~some) >= least


def test_products_of_indices_that_overflow_empty_nothing() -> None:
    """int32 wraps, and so might the mask."""
    seen = traced(lambda b, h, i, j: i * i >= 0, masks=True)
    end = np.array([100_000.0])
    assert static_tiles(seen, (end, end), (end, end)) == (True, False)
