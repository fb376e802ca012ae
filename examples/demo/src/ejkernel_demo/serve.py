"""Text from a trained model by continuous batching: one compiled step writes and reads a paged cache for every mix of requests."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel_demo import data
from ejkernel_demo.model import Parameters, Primitives, Shape, block, logits, stacked
from ejkernel_demo.primitives import rotate_at
from ejkernel_demo.requests import Plan, Request, Scheduler, requests_from

_STAMP = re.compile(r"ejkernel\.(\w+)\[([\w.\-]+)\]")


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What the server has room for: requests at a time, tokens per step, pages of `page_size` tokens in each layer."""

    slots: int = 4
    tokens: int = 24
    pages: int = 40
    page_size: int = 8


class Server:
    """A compiled step and its cache.

    Attributes:
        compile_seconds: tracing, lowering and compiling the step; there is no other one.
        stamps: `(operation, implementation)` of every ejkernel call found in the compiled program.
    """

    def __init__(self, parameters: Parameters, shape: Shape, primitives: Primitives, capacity: Capacity) -> None:
        self.capacity, self._parameters = capacity, parameters
        self.entries = -(-shape.length // capacity.page_size)
        size = (shape.layers * capacity.pages, capacity.page_size, shape.key_heads, shape.head_size)
        self._caches = (jnp.zeros(size), jnp.zeros(size))
        plan = Plan(
            tokens=np.zeros(capacity.tokens, np.int32),
            positions=np.zeros(capacity.tokens, np.int32),
            kv_lens=np.zeros(capacity.slots, np.int32),
            block_tables=np.zeros((capacity.slots, self.entries), np.int32),
            query_start_loc=np.zeros(capacity.slots + 1, np.int32),
        )

        def step(caches: Any, parameters: Parameters, plan: Plan) -> Any:
            return _step(caches, parameters, plan, shape, primitives, capacity.pages)

        start = time.perf_counter()
        with jax.default_matmul_precision("float32"):
            self._compiled = jax.jit(step, donate_argnums=0).lower(self._caches, parameters, plan).compile()
        self.compile_seconds = time.perf_counter() - start
        self.stamps = sorted(set(_STAMP.findall(self._compiled.as_text() or "")))

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Answer all requests; returns how many steps it took, in how many mixes of new tokens, and the seconds."""
        room = self.capacity
        scheduler = Scheduler(
            requests, slots=room.slots, tokens=room.tokens, pages=room.pages, page_size=room.page_size, entries=self.entries
        )
        steps, start = 0, time.perf_counter()
        while scheduler.busy:
            self._caches, following = self._compiled(self._caches, self._parameters, scheduler.plan())
            scheduler.advance(np.asarray(following))
            steps += 1
        return {"steps": steps, "mixes": len(scheduler.mixes), "seconds": time.perf_counter() - start}


def _step(
    caches: tuple[jax.Array, jax.Array], parameters: Parameters, plan: Plan, shape: Shape, primitives: Primitives, pages: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The caches with the new tokens in them, and the likeliest byte after each slot's last new token."""

    def one(carry: Any, layer: Any) -> tuple[Any, None]:
        x, (key_cache, value_cache) = carry
        index, layer = layer
        held: list[Any] = []

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            query, key = rotate_at(query, key, plan.positions)
            tables = jnp.where(plan.block_tables < 0, -1, plan.block_tables + index * pages)
            out, *held[:] = ejkernel.chunked_prefill_paged_decode(
                query[0], key[0], value[0], key_cache, value_cache, plan.kv_lens, tables, plan.query_start_loc
            )
            return out[None]

        x = block(x, layer, shape, primitives.norm, attend)
        return (x, tuple(held)), None

    x = parameters["embedding"][plan.tokens][None]
    layers = (jnp.arange(shape.layers, dtype=jnp.int32), stacked(parameters))
    (x, caches), _ = jax.lax.scan(one, (x, caches), layers)
    last = x[0, jnp.maximum(plan.query_start_loc[1:] - 1, 0)]
    scores = primitives.norm(last, parameters["final_norm"]) @ parameters["embedding"].T
    return caches, jnp.argmax(scores, axis=-1).astype(jnp.int32)


def serve(
    parameters: Parameters, shape: Shape, primitives: Primitives, *, seed: int, capacity: Capacity = Capacity()
) -> tuple[dict[str, Any], Server]:
    """Serve a handful of requests, and compare every byte with the likeliest one of a full recomputation.

    Returns:
        The facts for the report, and the server.
    """
    requests = requests_from(data.load_text(), seed=seed, length=shape.length)
    server = Server(parameters, shape, primitives, capacity)
    found = server.run(requests)
    generated = sum(request.count for request in requests)
    return {
        "requests": len(requests),
        "slots": capacity.slots,
        "generated": generated,
        **found,
        "tokens_per_second": generated / found["seconds"],
        "compile_seconds": server.compile_seconds,
        "mismatches": mismatches(parameters, shape, primitives, requests),
        "texts": [{"prompt": _shown(request.prompt), "answer": _shown(bytes(request.answer))} for request in requests],
    }, server


def mismatches(parameters: Parameters, shape: Shape, primitives: Primitives, requests: Sequence[Request]) -> int:
    """How many generated bytes are not the likeliest ones after the same bytes without a cache."""
    tokens = np.zeros((len(requests), shape.length), np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.tokens)] = request.tokens
    with jax.default_matmul_precision("float32"):
        likeliest = jnp.argmax(jax.jit(logits, static_argnums=(2, 3))(parameters, tokens, shape, primitives), axis=-1)
    wrong = 0
    for row, request in zip(np.asarray(likeliest), requests, strict=True):
        before = len(request.prompt)
        wrong += int(np.sum(row[before - 1 : before + request.count - 1] != np.array(request.answer)))
    return wrong


def _shown(text: bytes) -> str:
    return text.decode("ascii", "replace")
