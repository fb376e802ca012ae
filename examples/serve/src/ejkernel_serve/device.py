"""What a step computes on the device: the trainer's own blocks, with attention that writes and reads pages.

Shapes: N tokens of all requests one after the other, R requests, W pages of the longest one, S tokens that are drawn, A logits of
each that are adjusted; P pages of each of L layers, of T tokens, K key heads and D channels.

What most requests do not ask for is absent from their batches, and so from the program that runs them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel_serve.config import MAX_TOP_LOGPROBS
from ejkernel_serve.layers import FEW, Layer, layers_of
from ejkernel_train.config import ModelConfig
from ejkernel_train.model import Model, rotary
from ejkernel_train.operations import choose
from ejkernel_train.parts import Context
from ejkernel_train.sharding import Layout

Array = jax.Array | np.ndarray[Any, Any]

TOP = (0, 5, MAX_TOP_LOGPROBS)
"""Numbers of likeliest tokens that a program reports."""


def adjusted_sizes(tokens: int) -> tuple[int, ...]:
    """Sizes of A of a vocabulary; each has programs of its own."""
    return (0, *(size for size in (16, 64, 256, 1024, 4096, 16384) if 2 * size <= tokens), tokens)


class Pages(NamedTuple):
    """Keys and values `[L * P, T, K, D]`: page p of layer l is row `l P + p`, so that no layer is ever cut out of its array."""

    keys: jax.Array
    values: jax.Array


class Batch(NamedTuple):
    """The tokens of one step, and how the next token of each request is drawn.

    Attributes:
        tokens: int32 `[N]`; in a burst, -1 for the last one that the burst before has drawn in that row.
        positions: int32 `[N]`, of each token in its text.
        starts: int32 `[R + 1]`, cumulative numbers of tokens; requests that are not in use have none.
        lengths: int32 `[R]`, tokens of each request after this step.
        tables: int32 `[R, W]`, pages of each request.
        rows: int32 `[S]`, the tokens after which one is drawn.
        seeds: uint32 `[S, 2]`, the words of a Threefry key.
        drawn: int32 `[S]`, how many tokens the request has drawn before.
        temperature: float32 `[S]`.
        top_k: int32 `[S]`, 0 for all.
        top_p: float32 `[S]`.
        tree: float32 `[R, Q, Q]`, what the first Q new tokens of a request see of each other: see `speculative.tree_bias`. None
            without drafts.
        min_p: float32 `[S]`. None: 0.
        adjusted: int32 `[S, A]`, tokens whose logits l become `(l / factor if l > 0 else l * factor) + bias` before one is drawn;
            none twice in a row, -1 where there are fewer. None: none.
        factor, bias: float32 `[S, A]`.
        allowed: uint32 `[S, ceil(Weights.tokens / 32)]`, a bit for each token that may be drawn, the lowest first. None: all.
        targets: int32 `[S]`, tokens whose log-probabilities are reported instead of those of the drawn ones; -1: the drawn one's.
            None: -1.
    """

    tokens: Array
    positions: Array
    starts: Array
    lengths: Array
    tables: Array
    rows: Array
    seeds: Array
    drawn: Array
    temperature: Array
    top_k: Array
    top_p: Array
    tree: Array | None = None
    min_p: Array | None = None
    adjusted: Array | None = None
    factor: Array | None = None
    bias: Array | None = None
    allowed: Array | None = None
    targets: Array | None = None


class Draws(NamedTuple):
    """What a step has drawn. Log-probabilities are the model's, before adjustments, temperature and filters.

    Those of a burst have a second axis, `[S, number, ...]`.

    Attributes:
        tokens: int32 `[S]`; -1 where the logits are not finite.
        logprobs: float32 `[S]`, of them or of `Batch.targets`.
        top_tokens: int32 `[S, top]`, the likeliest first.
        top_logprobs: float32 `[S, top]`.
    """

    tokens: Array
    logprobs: Array
    top_tokens: Array | None = None
    top_logprobs: Array | None = None


Fields = tuple[tuple[str, tuple[int, ...], str], ...]
"""Names, shapes and dtypes of the arrays of a batch."""


class Weights(eqx.Module):
    """A model as its products read it.

    Attributes:
        embedding: `[V, d]`.
        layers: in their order.
        norm: `[d]`, before the head.
        head: `[V, d]`; None where the embedding is it.
        cos, sin: `[positions, D / 2]`.
        epsilon: of the norm.
        tokens: of the vocabulary. A model may have more; they are never drawn.
    """

    embedding: jax.Array
    layers: tuple[Layer, ...]
    norm: jax.Array
    head: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    epsilon: float = eqx.field(static=True)
    tokens: int = eqx.field(static=True)


def prepare(model: Model, dtype: str, positions: int, tokens: int) -> Weights:
    """Parameters in the dtype of the products, for a vocabulary of so many tokens.

    Raises:
        ValueError: the model keeps something else than the keys and values of attention, or has fewer tokens.
    """
    config = model.config
    others = sorted({*config.pattern} - {"attention", "gated_attention"})
    if others:
        raise ValueError(f"the model has blocks of {', '.join(others)}, whose states have no pages; serve llama or moe")
    if config.vocabulary < tokens:
        raise ValueError(f"the model has a vocabulary of {config.vocabulary}; bytes and a mark need {tokens}")
    layers = tuple(layers_of(model.compute_copy(dtype)))
    embedding, head = model.embedding.astype(dtype), None if model.head is None else model.head.astype(dtype)
    return Weights(embedding, layers, model.norm, head, *rotary(config, positions), config.epsilon, tokens)


def empty_pages(config: ModelConfig, pages: int, page_size: int, dtype: str) -> Pages:
    shape = config.layers * pages, page_size, config.key_heads, config.head_size
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def step(weights: Weights, pages: Pages, batch: Batch, top: int = 0) -> tuple[Pages, Draws]:
    """Compute the new tokens, and draw what comes after some of them; report so many of the likeliest there.

    Returns:
        The pages with the new tokens' keys and values, in place if they are donated; what was drawn.
    """
    angles = weights.cos[batch.positions], weights.sin[batch.positions]
    per_layer = len(pages.keys) // len(weights.layers)
    x = weights.embedding[batch.tokens][None]
    run = jax.jit(_block)  # so that the layers are traced and lowered once
    for number, layer in enumerate(weights.layers):
        x, pages = run(layer, x, angles, pages, batch, jnp.int32(number * per_layer))
    rows, head = x[0, batch.rows], weights.embedding if weights.head is None else weights.head
    if len(rows) <= FEW:
        logits = ejkernel.fused_linear(rows, head, weights.norm, epsilon=weights.epsilon)
    else:
        logits = jnp.einsum("sd,vd->sv", choose("ejkernel").rms_norm(rows, weights.norm, weights.epsilon), head)
    return pages, _draw(logits, batch, top, weights.tokens)


def steps(weights: Weights, pages: Pages, batch: Batch, before: jax.Array, number: int, top: int = 0) -> tuple[Pages, Draws]:
    """A burst: so many steps in one program, each with the tokens that the one before has drawn, without a trip to the host.

    For batches in which request i has one token, token i, after which row i is drawn; without trees, adjustments and targets.
    `before`: int32 `[S]`, what stands for tokens of -1.

    Returns:
        As `step`; what was drawn has a second axis, `[S, number]`.
    """

    def one(carry: tuple[Pages, Batch], _: None) -> tuple[tuple[Pages, Batch], Draws]:
        pages, batch = carry
        pages, draws = step(weights, pages, batch, top)
        following = batch._replace(
            tokens=with_rows(batch.tokens, draws.tokens),
            positions=batch.positions + 1,
            lengths=batch.lengths + (batch.lengths > 0).astype(jnp.int32),
            drawn=batch.drawn + 1,
        )
        return (pages, following), draws

    def with_rows(tokens: Array, drawn: Array) -> jax.Array:
        return jnp.asarray(tokens).at[: len(drawn)].set(jnp.asarray(drawn).clip(min=0))

    tokens = jnp.asarray(batch.tokens)
    batch = batch._replace(tokens=jnp.where(tokens < 0, with_rows(tokens, before), tokens))
    (pages, _), draws = jax.lax.scan(one, (pages, jax.tree.map(jnp.asarray, batch)), length=number)
    return pages, jax.tree.map(lambda each: jnp.moveaxis(each, 0, 1), draws)


class Programs(NamedTuple):
    """What an engine runs: one program for each bucket, and others for what few requests ask for.

    Attributes:
        step: `(leaves of the weights, pages, words, fields=, top=)`, words and fields from `pack`: the pages, donated, and the
            words of `Draws`.
        burst: `(leaves, pages, words, words of the burst before, fields=, number=, top=)`: the same.
    """

    step: Any
    burst: Any


@functools.cache
def programs(structure: Any) -> Programs:
    """Of weights with this structure, whose leaves are their arguments: walking through the weights takes longer than a launch."""

    def one(leaves: Sequence[jax.Array], pages: Pages, words: jax.Array, fields: Fields, top: int) -> tuple[Pages, jax.Array]:
        pages, draws = step(jax.tree.unflatten(structure, leaves), pages, _unpack(words, fields), top)
        return pages, _words_of(draws)

    def burst(
        leaves: Sequence[jax.Array], pages: Pages, words: jax.Array, before: jax.Array, fields: Fields, number: int, top: int
    ) -> tuple[Pages, jax.Array]:
        weights = jax.tree.unflatten(structure, leaves)
        pages, draws = steps(weights, pages, _unpack(words, fields), before[:, -1, 0], number, top)
        return pages, _words_of(draws)

    jit = functools.partial(jax.jit, donate_argnums=1)
    return Programs(
        jit(one, static_argnames=("fields", "top")),
        jit(burst, static_argnames=("fields", "number", "top")),
    )


def pack(batch: Batch) -> tuple[np.ndarray[Any, Any], Fields]:
    """A batch, whose numbers all have 32 bits, as one array of int32, which goes to the device in one copy: each takes a while,
    however small."""
    given = [(name, np.asarray(array)) for name, array in batch._asdict().items() if array is not None]
    fields = tuple((name, array.shape, array.dtype.name) for name, array in given)
    return np.concatenate([array.view(np.int32).ravel() for _, array in given]), fields


def _unpack(words: jax.Array, fields: Fields) -> Batch:
    found, start = dict[str, jax.Array](), 0
    for name, shape, dtype in fields:
        end = start + math.prod(shape)
        found[name] = jax.lax.bitcast_convert_type(words[start:end].reshape(shape), dtype)
        start = end
    return Batch(**found)


def _words_of(draws: Draws) -> jax.Array:
    """int32 `[..., 2 + 2 top]`, which comes back in one copy."""
    given = [draws.tokens[..., None], draws.logprobs[..., None], draws.top_tokens, draws.top_logprobs]
    return jnp.concatenate([jax.lax.bitcast_convert_type(each, jnp.int32) for each in given if each is not None], axis=-1)


def draws_of(words: np.ndarray[Any, Any]) -> Draws:
    """What a program returned, on the host."""
    top = words.shape[-1] // 2 - 1
    tokens, logprobs, top_tokens, top_logprobs = np.split(words, [1, 2, 2 + top], axis=-1)

    def numbers(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(words).view(np.float32)

    drawn = tokens[..., 0], numbers(logprobs)[..., 0]
    return Draws(*drawn, top_tokens, numbers(top_logprobs)) if top else Draws(*drawn)


def _block(
    layer: Layer, x: jax.Array, angles: tuple[jax.Array, jax.Array], pages: Pages, batch: Batch, first: jax.Array
) -> tuple[jax.Array, Pages]:
    """A layer on the stream `[1, N, d]`; its pages begin at row `first`."""
    where = batch.lengths, batch.tables + first, batch.starts
    written = pages

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:  # [1, N, heads, D] each
        nonlocal written
        written = Pages(*ejkernel.paged_cache_update(key[0], value[0], *pages, *where))
        return ejkernel.unified_attention(query[0], *written, *where, qq_bias=batch.tree)[None]

    operations = choose("ejkernel")._replace(attention=attention)
    return layer(x, Context(operations, Layout(), *angles)), written


def _draw(logits: jax.Array, batch: Batch, top: int, size: int) -> Draws:
    """From `[S, V]`, each with a key of its request's seed and of how many tokens that has drawn; `size`: of the vocabulary."""

    def key(seed: Any, drawn: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)

    allowed = None
    if batch.allowed is not None:
        bits = jnp.asarray(batch.allowed)[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None] & jnp.uint32(1)
        allowed = bits.reshape(len(bits), -1)[:, :size] != 0
    drawn = ejkernel.sample_tokens(
        _adjust(logits[:, :size], batch),
        jax.vmap(key)(batch.seeds, batch.drawn),
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        min_p=batch.min_p,
        token_mask=allowed,
    )
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    reported = drawn if batch.targets is None else jnp.where(batch.targets < 0, drawn, batch.targets)
    found = jnp.take_along_axis(logprobs, reported.clip(min=0)[:, None], axis=1)[:, 0]
    if not top:
        return Draws(drawn, found)
    likeliest, tokens = jax.lax.top_k(logprobs[:, :size], top)
    return Draws(drawn, found, tokens, likeliest)


def _adjust(logits: jax.Array, batch: Batch) -> jax.Array:
    """`[S, V]`, in float32 if any is adjusted."""
    if batch.adjusted is None:
        return logits
    assert batch.factor is not None and batch.bias is not None
    logits, rows = logits.astype(jnp.float32), jnp.arange(len(logits))[:, None]
    adjusted = jnp.where(batch.adjusted < 0, logits.shape[-1], batch.adjusted)  # beyond the last: dropped
    old = logits.at[rows, adjusted].get(mode="fill", fill_value=0)
    new = jnp.where(old > 0, old / batch.factor, old * batch.factor) + batch.bias
    return logits.at[rows, adjusted].set(new, mode="drop")
