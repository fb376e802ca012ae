"""Attention on random problems: shapes, flags, masks, biases, sinks, dropout, dtypes and block sizes, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import FEW, FLOOR, MANY, check_vmap, mapped_axes
from hypothesis import strategies as st

import ejkernel
from ejkernel.call import Request, named, policy as _policy
from ejkernel.masks import MaskInfo
from ejkernel.operations.flash_attention import pairs, reference
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.targets import target as _target
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close
from ejkernel_xla.flash_attention.config import FlashAttentionConfig

pytestmark = pytest.mark.filterwarnings("ignore:causal. with causal=True the one query")
"""A single query may be drawn, with its alignment left open."""

lengths = st.one_of(st.integers(0, 3), st.integers(0, 40))
sides = st.one_of(st.none(), st.integers(0, 12))


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Arguments of `canonicalise`, the mask's description by itself, and block sizes."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    info: MaskInfo | None
    config: FlashAttentionConfig


def _tokens(draw: Any, rng: np.random.Generator, batch: int, count: int, low: int, high: int) -> np.ndarray:
    return rng.integers(low, high, (draw(st.sampled_from((1, batch))), count)).astype(np.int32)


@st.composite
def mask_infos(draw: Any, rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int) -> MaskInfo:
    parts: dict[str, Any] = {}
    if draw(st.booleans()):
        shape = tuple(draw(st.sampled_from((1, size))) for size in (batch, heads, queries, keys))
        parts["dense"] = rng.random(shape) < draw(st.sampled_from((0.1, 0.7)))
    for name, count in (("query", queries), ("key", keys)):
        if draw(st.booleans()):
            parts[f"{name}_segments"] = np.sort(_tokens(draw, rng, batch, count, -1, 3), axis=1)[:, ::-1]
        if draw(st.integers(0, 3)) == 0:
            parts[f"{name}_positions"] = _tokens(draw, rng, batch, count, -3, 40)
        if draw(st.integers(0, 3)) == 0:
            parts[f"{name}_lengths"] = rng.integers(0, count + 1, draw(st.sampled_from((1, batch)))).astype(np.int32)
    causal = draw(st.booleans())
    return MaskInfo(
        **parts,
        causal=causal,
        causal_offset=draw(st.integers(-5, 5)),
        window=draw(maybe(st.tuples(sides, sides))),
        chunk_size=draw(maybe(st.integers(1, 15))),
        prefix=draw(maybe(st.integers(0, 15))) if causal else None,
        sizes=(batch, queries, keys),
    )


@st.composite
def problems(draw: Any) -> Drawn:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, queries, keys = draw(st.integers(1, 3)), draw(lengths), draw(lengths)
    key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size, value_size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    heads, dtype = key_heads * group, draw(st.sampled_from(("float32", "float32", "bfloat16", "float16")))

    def normal(*shape: int, dtype: str = dtype) -> Any:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    arrays: dict[str, Any] = {
        "query": normal(batch, queries, heads, size),
        "key": normal(batch, keys, key_heads, size),
        "value": normal(batch, keys, key_heads, value_size),
    }
    if draw(st.booleans()):
        shape = tuple(draw(st.sampled_from((1, full))) for full in (batch, heads, queries, keys))
        arrays["bias"] = normal(*shape[draw(st.sampled_from((0, 2))) :], dtype=draw(st.sampled_from((dtype, "float32"))))
    if draw(st.booleans()):
        shape = draw(st.sampled_from(((heads,), (heads, 2), (1, 3), (heads, 0))))
        arrays["softmax_aux"] = normal(*shape, dtype=draw(st.sampled_from((dtype, "float32"))))
    rate = draw(st.sampled_from((0.0, 0.0, 0.3)))
    if rate:
        arrays["dropout_seed"] = np.array([draw(st.integers(0, 2**32 - 1)), 7], np.uint32)
    info = draw(maybe(mask_infos(rng, batch, heads, queries, keys)))
    causal = draw(st.booleans())
    placed = info is not None and (info.causal_offset or info.query_positions is not None or info.key_positions is not None)
    options = {
        "softmax_scale": draw(maybe(st.sampled_from((-0.5, 0.0, 1.0)))),
        "causal": causal,
        "causal_alignment": draw(st.sampled_from((None, "top_left", "bottom_right"))) if causal and not placed else None,
        "sliding_window": draw(maybe(st.one_of(st.integers(0, 12), st.tuples(sides, sides)))),
        "chunk_size": None if info is not None and info.chunk_size else draw(maybe(st.integers(1, 15))),
        "prefix": draw(maybe(st.integers(0, 15))) if causal else None,
        "logits_soft_cap": draw(maybe(st.sampled_from((0.5, 20.0)))),
        "dropout_prob": rate,
        "normalize_output": draw(st.sampled_from((True, True, False))),
        "return_lse": draw(st.booleans()),
    }
    blocks = [draw(st.one_of(st.integers(1, 17), st.just(64))) for _ in range(4)]
    return Drawn(arrays, options, info, FlashAttentionConfig(*blocks))


def as_float64(values: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else None), values)


def check(drawn: Drawn) -> None:
    bound = OPERATION.canonicalise(**drawn.arrays, mask_info=drawn.info, **drawn.options)
    _check_visibility(drawn, bound)
    policy = _policy.policy_for_call("flash_attention", "xla")
    request = Request(OPERATION, bound.call, _target.resolve_target(()), policy, drawn.config)
    moving = {name: value for name, value in named(bound.inputs) if name in OPERATION.differentiable}

    @jax.jit
    def run(values: Any) -> Any:
        outputs, pull = jax.vjp(lambda values: OPERATION.run(request, bound.inputs._replace(**values)), values)
        cotangents = jax.tree.map(
            lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(x.dtype), outputs
        )
        return outputs, cotangents, pull(cotangents)[0]

    outputs, cotangents, gradients = run(moving)
    call = dataclasses.replace(bound.call, save_residuals=True)
    inputs64 = as_float64(bound.inputs)
    with np.errstate(all="ignore"):
        outputs64 = reference.forward(call, inputs64)
        gradients64 = reference.backward(call, inputs64, outputs64, as_float64(cotangents))
    dtype = bound.call.query.dtype
    for name, value in named(outputs):
        check_close(name, value, getattr(outputs64, name), FORWARD[dtype], FLOOR[dtype])
    for name, value in gradients.items():
        assert value.dtype == moving[name].dtype
        check_close(f"gradient of {name}", value, getattr(gradients64, name), GRADIENT[dtype], FLOOR[dtype])


def _check_visibility(drawn: Drawn, bound: Any) -> None:
    """What the operation makes of a `MaskInfo` is what the `MaskInfo` says of itself."""
    own = ("causal", "sliding_window", "chunk_size", "prefix")
    if drawn.info is None or any(drawn.options[name] not in (None, False) for name in own):
        return
    seen = pairs.visible(bound.call, as_float64(bound.inputs), np)
    said = np.asarray(drawn.info.attention_mask)
    shape = np.broadcast_shapes(seen.shape, said.shape)
    assert np.array_equal(np.broadcast_to(seen, shape), np.broadcast_to(said, shape))


@FEW
@hypothesis.given(problems())
def test_random_problems(drawn: Drawn) -> None:
    check(drawn)


@pytest.mark.slow
@MANY
@hypothesis.given(problems())
def test_many_random_problems(drawn: Drawn) -> None:
    check(drawn)


def check_mapped(drawn: Drawn, data: Any) -> None:
    """`vmap`, gradients included; the description of the mask is shared, as its sizes are part of it."""
    arrays = {name: value for name, value in drawn.arrays.items() if name != "dropout_seed"}
    options = {**drawn.options, "dropout_prob": 0.0}
    check_vmap("flash_attention", arrays, options, data.draw(mapped_axes(arrays)), size=2)


@FEW
@hypothesis.given(problems(), st.data())
def test_mapped_over_random_axes(drawn: Drawn, data: Any) -> None:
    check_mapped(drawn, data)


@pytest.mark.slow
@hypothesis.settings(MANY, max_examples=60)
@hypothesis.given(problems(), st.data())
def test_mapped_over_many_random_axes(drawn: Drawn, data: Any) -> None:
    check_mapped(drawn, data)


# Packed sequences beside one dense call for each


@dataclasses.dataclass(frozen=True)
class Packed:
    query_lengths: list[int]
    key_lengths: list[int] | None
    padding: int
    heads: tuple[int, int]
    options: dict[str, Any]
    traced: bool
    seed: int


@st.composite
def packings(draw: Any) -> Packed:
    count = draw(st.integers(0, 4))
    lengths_of = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    causal = draw(st.booleans())
    key_heads = draw(st.integers(1, 2))
    options = {
        "causal": causal,
        "causal_alignment": draw(st.sampled_from((None, "top_left", "bottom_right"))) if causal else None,
        "sliding_window": draw(maybe(st.tuples(sides, sides))),
        "chunk_size": draw(maybe(st.integers(1, 5))),
        "logits_soft_cap": draw(maybe(st.just(2.0))),
    }
    return Packed(
        query_lengths=draw(lengths_of),
        key_lengths=draw(maybe(lengths_of)),
        padding=draw(st.integers(0, 3)),
        heads=(key_heads * draw(st.integers(1, 2)), key_heads),
        options=options,
        traced=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def check_packed(drawn: Packed) -> None:
    rng = np.random.default_rng(drawn.seed)
    key_lengths = drawn.query_lengths if drawn.key_lengths is None else drawn.key_lengths
    ends = [np.cumsum([0, *sizes]).astype(np.int32) for sizes in (drawn.query_lengths, key_lengths)]
    heads, key_heads = drawn.heads

    def normal(tokens: int, heads: int, size: int) -> np.ndarray:
        return rng.standard_normal((int(tokens) + drawn.padding, heads, size)).astype(np.float32)

    query, key = normal(ends[0][-1], heads, 4), normal(ends[1][-1], key_heads, 4)
    value, grad = normal(ends[1][-1], key_heads, 3), normal(ends[0][-1], heads, 3)
    given = [ends[0], None if drawn.key_lengths is None else ends[1]]

    def run(query: Any, key: Any, value: Any, given: Any) -> Any:
        return ejkernel.flash_attn_varlen(query, key, value, *given, platform="xla", return_lse=True, **drawn.options)

    def all_of(query: Any, key: Any, value: Any, given: Any) -> Any:
        (out, lse), pull = jax.vjp(lambda *arrays: run(*arrays, given), query, key, value)
        return out, lse, *pull((jnp.asarray(grad), jnp.where(lse > -jnp.inf, jnp.cos(lse), 0)))

    found = (jax.jit(all_of) if drawn.traced else all_of)(query, key, value, given)
    expected = _one_by_one(query, key, value, grad, ends, drawn.options)
    for name, got, wanted in zip(("out", "lse", "query", "key", "value"), found, expected, strict=True):
        check_close(name, got, wanted, GRADIENT["float32"], FLOOR["float32"])


def _one_by_one(query: Any, key: Any, value: Any, grad: Any, ends: Any, options: Any) -> tuple[np.ndarray, ...]:
    out, lse = np.zeros(grad.shape), np.full(grad.shape[:2], -np.inf)
    d_query, d_key, d_value = (np.zeros(array.shape) for array in (query, key, value))
    for i in range(len(ends[0]) - 1):
        rows, columns = (slice(int(end[i]), int(end[i + 1])) for end in ends)
        arrays = [as_float64(array)[None] for array in (query[rows], key[columns], value[columns])]
        bound = OPERATION.canonicalise(*(jnp.asarray(a, jnp.float32) for a in arrays), return_lse=True, **options)
        inputs = as_float64(bound.inputs)
        with np.errstate(all="ignore"):
            outputs = reference.forward(bound.call, inputs)
            d_lse = np.where(np.isneginf(outputs.lse), 0, np.cos(outputs.lse))
            found = reference.backward(bound.call, inputs, outputs, FlashAttentionOutputs(as_float64(grad[rows])[None], d_lse))
        out[rows], lse[rows] = outputs.out[0], outputs.lse[0]
        d_query[rows], d_key[columns], d_value[columns] = found.query[0], found.key[0], found.value[0]
    return out, lse, d_query, d_key, d_value


@FEW
@hypothesis.given(packings())
def test_random_packings(drawn: Packed) -> None:
    check_packed(drawn)


@pytest.mark.slow
@MANY
@hypothesis.given(packings())
def test_many_random_packings(drawn: Packed) -> None:
    check_packed(drawn)
