"""`chunk_size` of the functions on paged caches: a token sees the keys of its own chunk alone, as in Llama 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations.paged_attention.cases import cache_of
from ejkernel.utils.tolerance import Tolerance, check_close

CLOSE = Tolerance(1e-5, 1e-4)
HEADS, KEY_HEADS, SIZE = 4, 2, 8


class Problem:
    """Requests `(new tokens, keys)` over pages, slots that nobody uses full of NaN, and what dense attention makes of them."""

    def __init__(self, requests: Any, page_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        described, used = cache_of(rng, requests, page_size=page_size)
        self.requests, self.page_size = requests, page_size
        self.starts, self.lengths, self.tables = (described[n] for n in ("query_start_loc", "kv_lens", "block_tables"))
        self.key, self.value = rng.standard_normal((2, *used.shape, KEY_HEADS, SIZE)).astype(np.float32)
        self.key[~used] = self.value[~used] = np.nan
        self.query = rng.standard_normal((int(self.starts[-1]), HEADS, SIZE)).astype(np.float32)

    def kept(self, request: int) -> tuple[Any, Any]:
        """Keys and values `[n, K, D]` of a request."""
        slots = np.arange(self.lengths[request])
        page, offset = self.tables[request][slots // self.page_size], slots % self.page_size
        return self.key[page, offset], self.value[page, offset]

    def tokens(self) -> Iterator[tuple[int, int, int]]:
        """Token, request and position; no token stands before its first key."""
        for request, (new, length) in enumerate(self.requests):
            for i in range(max(new - length, 0), new):
                yield int(self.starts[request]) + i, request, length - new + i

    def expected(self, chunk: int, window: int | None = None) -> tuple[Any, Any]:
        out, lse = np.zeros(self.query.shape), np.full(self.query.shape[:2], -np.inf)
        for token, request, position in self.tokens():
            first = max(position // chunk * chunk, 0 if window is None else position - window + 1)
            key, value = (array[first : position + 1].astype(np.float64) for array in self.kept(request))
            for head in range(HEADS):
                logits = key[:, head // 2] @ self.query[token, head] / np.sqrt(SIZE)
                lse[token, head] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
                out[token, head] = np.exp(logits - lse[token, head]) @ value[:, head // 2]
        return out, lse

    @property
    def described(self) -> tuple[Any, Any, Any]:
        return jnp.asarray(self.lengths), jnp.asarray(self.tables), jnp.asarray(self.starts)


MIXED = ((3, 13), (1, 8), (9, 9), (0, 4), (1, 3), (5, 2), (1, 0))
DECODE = ((1, 13), (1, 8), (1, 1), (1, 0), (1, 16))


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 1), (1, 3), (2, 4), (4, 4), (4, 12), (4, 64)])
@pytest.mark.parametrize("window", [None, 2])
def test_prompts_and_steps_in_any_mix(page_size: int, chunk: int, window: int | None) -> None:
    problem = Problem(MIXED, page_size)
    options = {"chunk_size": chunk, "sliding_window": window, "return_lse": True}

    def attend(query: Any, key: Any, value: Any, described: Any) -> Any:
        return ejkernel.unified_attention(query, key, value, *described, **options)

    got = jax.jit(attend)(problem.query, problem.key, problem.value, problem.described)
    for name, one, wanted in zip(("out", "lse"), got, problem.expected(chunk, window), strict=True):
        check_close(name, one, wanted, CLOSE)


def test_random_requests() -> None:
    rng = np.random.default_rng(1)
    for seed in range(12):
        page_size = int(rng.choice([1, 2, 4]))
        requests = [(int(rng.integers(0, length + 3)), int(length)) for length in rng.integers(0, 25, rng.integers(1, 5))]
        problem, chunk = Problem(requests, page_size, seed), page_size * int(rng.integers(1, 5))
        got = ejkernel.unified_attention(problem.query, problem.key, problem.value, *problem.described, chunk_size=chunk)
        check_close(f"{requests} in chunks of {chunk}", got, problem.expected(chunk)[0], CLOSE)


def test_every_function_on_caches() -> None:
    """Single steps, which have one request each whatever the chunk: the call has as many as it is given."""
    problem = Problem(DECODE, 2)
    lengths, tables, starts = problem.described
    wanted, lse = problem.expected(4)
    caches = problem.key, problem.value
    check_close(
        "page", ejkernel.page_attention(problem.query, *caches, lengths, tables, layout="pthd", chunk_size=4), wanted, CLOSE
    )
    flat = (array.reshape(-1, KEY_HEADS, SIZE) for array in caches)
    got = ejkernel.decode_attention(problem.query, *flat, tables, lengths, page_size=2, chunk_size=4)
    check_close("decode", got[0], wanted, CLOSE)
    check_close("decode", got[1], lse, CLOSE)
    interleaved = np.stack(caches, axis=3).reshape(*problem.key.shape[:2], 2 * KEY_HEADS, SIZE)
    got = ejkernel.ragged_page_attention_v2(problem.query, interleaved, lengths, tables, starts, len(DECODE), chunk_size=4)
    check_close("ragged", got, wanted, CLOSE)

    longest = int(lengths.max())
    dense = np.full((2, len(DECODE), longest + 3, KEY_HEADS, SIZE), np.nan, np.float32)
    for request in range(len(DECODE)):
        for array, kept in zip(dense, problem.kept(request), strict=True):
            array[request, 3 : 3 + len(kept)] = kept
    begin = jnp.full(len(DECODE), 3)
    got = ejkernel.ragged_decode_attention(problem.query, *dense, begin, begin + lengths, chunk_size=4)
    check_close("ragged decode", got, wanted, CLOSE)


def test_prefill_and_updates() -> None:
    problem = Problem(((9, 13),), 2)
    lengths, tables, starts = problem.described
    wanted = problem.expected(4)[0]
    got = ejkernel.prefill_page_attention(
        problem.query, problem.key, problem.value, lengths[0], tables[0], layout="pthd", chunk_size=4
    )
    check_close("prefill", got, wanted, CLOSE)

    key, value = (array[-9:] for array in problem.kept(0))
    stale = [np.array(array) for array in (problem.key, problem.value)]
    slots = np.arange(4, 13)
    for array in stale:
        array[problem.tables[0][slots // 2], slots % 2] = np.nan
    got = ejkernel.chunked_prefill_paged_decode(problem.query, key, value, *stale, lengths, tables, starts, chunk_size=4)[0]
    check_close("chunked prefill", got, wanted, CLOSE)
    packed = np.stack(stale, axis=3)  # [pages, page_size, K, 2, D]
    distribution = jnp.array([0, 1, 1])
    arrays = (problem.query, key, value, packed, lengths, tables[0], starts, distribution)
    check_close("ragged v3", ejkernel.ragged_page_attention_v3(*arrays, chunk_size=4)[0], wanted, CLOSE)


def test_gradients() -> None:
    problem = Problem(((3, 13), (1, 6)), 2)
    key, value = (np.nan_to_num(array) for array in (problem.key, problem.value))
    weights = np.random.default_rng(2).standard_normal(problem.query.shape).astype(np.float32)

    def ours(*arrays: Any) -> Any:
        return jnp.sum(weights * ejkernel.unified_attention(*arrays, *problem.described, chunk_size=4))

    def dense(query: Any, key: Any, value: Any) -> Any:
        total = jnp.zeros(())
        for token, request, position in problem.tokens():
            slots = np.arange(position // 4 * 4, position + 1)
            at = problem.tables[request][slots // 2], slots % 2
            k, v = (jnp.repeat(array[at], 2, axis=1) for array in (key, value))
            p = jax.nn.softmax(jnp.einsum("hd,shd->hs", query[token], k, precision="highest") / np.sqrt(SIZE))
            total += jnp.sum(weights[token] * jnp.einsum("hs,shd->hd", p, v, precision="highest"))
        return total

    arrays = tuple(map(jnp.asarray, (problem.query, key, value)))
    for got, wanted in zip(jax.grad(ours, (0, 1, 2))(*arrays), jax.grad(dense, (0, 1, 2))(*arrays), strict=True):
        check_close("gradient", got, wanted, CLOSE)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_size": 3}, ValueError, "chunk_size: got 3, expected a multiple of the 2 tokens of a page"),
        ({"chunk_size": 0}, ValueError, "chunk_size: got 0, expected a value >= 1"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size: got 2.0, expected an int"),
        ({"chunk_size": 4, "causal": False}, ValueError, "chunk_size: got 4, expected None without causal"),
        (
            {"chunk_size": 4, "qq_bias": np.zeros((3, 3), np.float32)},
            ValueError,
            "chunk_size: got 4, expected None beside qq_bias",
        ),
    ],
)
def test_chunks_that_are_refused(options: Any, error: type[Exception], message: str) -> None:
    problem = Problem(((1, 5),), 2)
    with pytest.raises(error, match=message):
        ejkernel.unified_attention(problem.query, problem.key, problem.value, *problem.described, **options)
