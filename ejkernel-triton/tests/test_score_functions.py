"""Score functions in Triton's kernels: what their programs compute, and what is refused before a kernel is built."""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.operations.flash_attention.score_functions.record import ScoreFunction, packed
from ejkernel.operations.flash_attention.score_functions.tracing import Tracing
from ejkernel.plugin import Target
from ejkernel_triton.flash_attention.capability import supports_backward, supports_forward
from ejkernel_triton.flash_attention.score_params import ScoreParams, score_params

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
import triton
import triton.language as tl

from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.flash_attention.score_tiles import evaluated

H200 = Target("gpu", "NVIDIA H200", "9.0")
TOKENS = 16
BATCH, HEAD = 1, 3
RNG = np.random.default_rng(0)
SCORES = jnp.asarray(2 * RNG.standard_normal((TOKENS, TOKENS)), jnp.float32)
SLOPES = jnp.asarray(RNG.standard_normal(4), jnp.bfloat16)
GATES = jnp.asarray(RNG.standard_normal((2, 4, TOKENS)), jnp.float32)
BUCKETS = jnp.asarray(RNG.integers(0, 9, TOKENS), jnp.int32)


@pytest.fixture(autouse=True)
def as_users_write() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@dataclasses.dataclass(frozen=True)
class Params:
    """What the programs stand in."""

    score: ScoreParams
    mask_program: None = None
    one: None = None


@triton.jit
def over_tile_kernel(
    p_scores, p_values, p_integers, batch, head, p_out, R: tl.constexpr, WHICH: tl.constexpr, SIZE: tl.constexpr
):
    o_query, o_key = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    b_scores = tl.load(p_scores + o_query * SIZE + o_key)
    p_masks = (0, 0, 0, 0, 0, 0, 0, p_values, p_integers, batch, head)
    tl.store(p_out + o_query * SIZE + o_key, tl.zeros_like(b_scores) + evaluated(p_masks, b_scores, o_query, o_key, R, WHICH))


def traced(function: Callable[..., Any]) -> tuple[ScoreFunction, Any, Any]:
    tracing = Tracing(jnp.float32)
    found = tracing.traced("score_mod", function, None, masks=False)
    values, integers = packed(tracing.arrays, "values", jnp.float32), packed(tracing.arrays, "integers", jnp.int32)
    return found, jnp.zeros(1) if values is None else values, jnp.zeros(1, jnp.int32) if integers is None else integers


def call_of(**options: Any) -> Any:
    array = jnp.zeros((2, TOKENS, 4, 16))
    return OPERATION.canonicalise(array, array, array, **options).call


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "slopes": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "gates": lambda s, b, h, i, j: s * GATES[b, h, i] - GATES[b, h, j],
    "an index past the end": lambda s, b, h, i, j: s + GATES[b, h, i + 5],
    "buckets": lambda s, b, h, i, j: s + GATES[0, h, BUCKETS[i]] * (BUCKETS[i] == BUCKETS[j]),
    "soft cap": lambda s, b, h, i, j: 3 * jnp.tanh(s / 3),
    "whole numbers": lambda s, b, h, i, j: s + ((i - j) // 3 - (j - i) % 4 + jnp.sign(i - j) * jnp.minimum(i, 7)),
    "bits": lambda s, b, h, i, j: jnp.where(((i > 3) & ~(j < 9)) ^ (i == j), s, -s),
    "exponentials": lambda s, b, h, i, j: jnp.exp(s) + jnp.exp2(-s) + jnp.expm1(s / 8),
    "logarithms": lambda s, b, h, i, j: (
        jnp.log(abs(s) + 1) + jnp.log1p(abs(s)) + jnp.sqrt(abs(s) + 1) + jax.lax.rsqrt(s * s + 1)
    ),
    "waves": lambda s, b, h, i, j: jnp.sin(s) * jnp.cos(s) + jax.scipy.special.erf(s),
    "powers": lambda s, b, h, i, j: s**3 - jnp.square(s) + jnp.clip(s, -1, 1) + jnp.floor(s) + jnp.ceil(s),
    "rules of their own": lambda s, b, h, i, j: jax.nn.relu(s) + jax.nn.softplus(s) + jax.nn.silu(s) + jnp.logaddexp(s, 0.5),
    "no score": lambda s, b, h, i, j: jnp.float32(0.5),
    "infinities": lambda s, b, h, i, j: jnp.where(i + j == 9, -jnp.inf, s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_compute_what_the_function_says(name: str, interpreted: None) -> None:
    """Results and derivatives by the score, over a tile of indices."""
    function = FUNCTIONS[name]
    found, values, integers = traced(function)
    params = score_params(dataclasses.replace(call_of(), score_mod=found))
    assert params is not None
    index = jnp.arange(TOKENS)

    def over_tile(one: Callable[..., Any]) -> Any:
        by_key = jax.vmap(lambda s, i, j: one(s, BATCH, HEAD, i, j), in_axes=(0, None, 0))
        return jax.vmap(by_key, in_axes=(0, 0, None))(SCORES, index, index)

    for which, expected in (("result", over_tile(function)), ("slope", over_tile(jax.grad(function)))):
        (got,) = call_kernel(
            over_tile_kernel,
            (SCORES, values, integers, BATCH, HEAD),
            ((SCORES.shape, jnp.float32),),
            grid=1,
            num_warps=1,
            R=Params(params),
            WHICH=which,
            SIZE=TOKENS,
        )
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "rows of arrays": (
        {"score_mod": lambda s, b, h, i, j: s + GATES[b, :, i] @ GATES[b, :, j]},
        "forward",
        "score_mod computes with rows of arrays",
    ),
    "a gather": (
        {"mask_mod": lambda b, h, i, j: BUCKETS.at[i].get(mode="fill", fill_value=0) == BUCKETS[j]},
        "forward",
        "mask_mod takes elements of an array by gather",
    ),
    "control flow": (
        {"score_mod": lambda s, b, h, i, j: jax.lax.cond(i > j, lambda x: x, lambda x: -x, s)},
        "forward",
        "score_mod computes cond",
    ),
    "a primitive": ({"score_mod": lambda s, b, h, i, j: jax.lax.lgamma(s)}, "forward", "score_mod computes lgamma"),
    "other places": (
        {"score_mod": lambda s, b, h, i, j: s + i, "query_index": jnp.arange(TOKENS, dtype=jnp.int32)[None]},
        "forward",
        "query_index tells functions of other places",
    ),
    "elements that both choose": (
        {"score_mod": lambda s, b, h, i, j: s + GATES[b, h, abs(i - j)]},
        "backward",
        "score_mod reads elements that query and key choose together",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_is_lacking(name: str) -> None:
    options, phase, reason = REFUSED[name]
    call = call_of(**options)
    supports = {"forward": supports_forward, "backward": supports_backward}
    assert str(supports[phase](call, H200)).startswith(reason)
    assert phase == "forward" or supports_forward(call, H200) is None
