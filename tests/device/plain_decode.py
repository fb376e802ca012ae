"""Decoding in plain JAX, for comparison with `python -m ejkernel_serve.bench`: what a user writes for one batch of equal lengths.

    python plain_decode.py --out FILE.json --random 1.3b --requests 1 16 64

The model and its weights are those of `examples/serve`, its operations those of the trainer's plain build. Keys and values lie in
one array a layer, as long as prompt and completion together; all tokens of a completion come from one program, which attends to
all places under a mask and draws from the 50 likeliest, from the fewest of them with a probability of 0.95. Nothing can join,
leave or stop while it runs.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_serve import bench, device, models
from ejkernel_train.operations import choose
from ejkernel_train.parts import Context
from ejkernel_train.sharding import Layout

TOP_K, TOP_P, TEMPERATURE = 50, 0.95, 0.8
PLAIN = choose("plain")


def forward(weights: device.Weights, cache: Any, tokens: jax.Array, start: Any) -> tuple[Any, jax.Array]:
    """Tokens `[B, T]` from place `start` on. Returns the cache, `[B, length, K, D]` twice a layer, and the last logits `[B, V]`."""
    places = start + jnp.arange(tokens.shape[1])
    x, written = weights.embedding[tokens], []
    for layer, (keys, values) in zip(weights.layers, cache, strict=True):

        def attention(query: jax.Array, key: jax.Array, value: jax.Array, keys: Any = keys, values: Any = values) -> jax.Array:
            keys = jax.lax.dynamic_update_slice_in_dim(keys, key, start, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, value, start, axis=1)
            written.append((keys, values))
            mask = jnp.arange(keys.shape[1]) <= places[:, None]
            return jax.nn.dot_product_attention(query, keys, values, mask=mask[None, None])

        context = Context(PLAIN._replace(attention=attention), Layout(), weights.cos[places], weights.sin[places])
        x, _ = layer.whole()(x, context)
    rows = PLAIN.rms_norm(x[:, -1], weights.norm, weights.epsilon)
    return written, jnp.einsum("sd,vd->sv", rows, weights.embedding if weights.head is None else weights.head)


def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
    best, tokens = jax.lax.top_k(logits.astype(jnp.float32) / TEMPERATURE, TOP_K)
    probability = jax.nn.softmax(best)
    inside = jnp.cumsum(probability, axis=-1) - probability < TOP_P
    drawn = jax.random.categorical(key, jnp.where(inside, best, -jnp.inf))
    return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0]


@functools.partial(jax.jit, donate_argnums=1)
def prefill(weights: device.Weights, cache: Any, prompt: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
    cache, logits = forward(weights, cache, prompt, 0)
    return cache, draw(logits, key)


@functools.partial(jax.jit, donate_argnums=1, static_argnames="number")
def decode(
    weights: device.Weights, cache: Any, first: jax.Array, start: int, key: jax.Array, number: int
) -> tuple[Any, jax.Array]:
    """The next tokens `[number, B]`."""

    def one(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
        cache, tokens = carry
        cache, logits = forward(weights, cache, tokens[:, None], at)
        drawn = draw(logits, jax.random.fold_in(key, at))
        return (cache, drawn), drawn

    (cache, _), drawn = jax.lax.scan(one, (cache, first), start + jnp.arange(number))
    return cache, drawn


def measure(weights: device.Weights, config: Any, number: int, prompt: int, generate: int) -> dict[str, Any]:
    key = jax.random.key(number)
    tokens = jax.random.randint(key, (number, prompt), 0, config.vocabulary)
    shape = number, prompt + generate, config.key_heads, config.head_size
    prefills, decodes = [], []
    for _ in range(4):  # the first one compiles
        cache = [(jnp.zeros(shape, weights.embedding.dtype), jnp.zeros(shape, weights.embedding.dtype)) for _ in weights.layers]
        jax.block_until_ready(cache)
        begin = time.perf_counter()
        cache, first = prefill(weights, cache, tokens, key)
        first.block_until_ready()
        middle = time.perf_counter()
        cache, drawn = decode(weights, cache, first, prompt, key, generate - 1)
        drawn.block_until_ready()
        prefills.append(middle - begin)
        decodes.append((time.perf_counter() - middle) / (generate - 1))
    first, each = statistics.median(prefills[1:]), statistics.median(decodes[1:])
    return {
        "requests": number,
        "first_token_seconds": first,
        "token_seconds": each,
        "tokens_per_second": number * generate / (first + each * (generate - 1)),
    }


def main() -> int:
    arguments = bench.parser().parse_args()
    model = models.load_model(arguments.model, arguments.random or arguments.size, arguments.checkpoint)
    weights = device.prepare(model, arguments.dtype, arguments.prompt + arguments.generate, model.config.vocabulary)
    rows = []
    for number in arguments.requests:
        rows.append(measure(weights, model.config, number, arguments.prompt, arguments.generate))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": arguments.model,
        "size": arguments.random,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
