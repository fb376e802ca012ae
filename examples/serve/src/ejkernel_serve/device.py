"""What a step computes on the device: the trainer's own blocks, with attention that writes and reads pages.

Shapes: N tokens of all requests one after the other, R requests, W pages of the longest one, S tokens that are drawn, A logits of
each that are adjusted; P pages of each of L layers, of T tokens, K key heads and D channels.

What most requests do not ask for is absent from their batches, and so from the program that runs them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel_serve.config import MAX_TOP_LOGPROBS
from ejkernel_train.config import ModelConfig
from ejkernel_train.data import START
from ejkernel_train.model import Block, Context, Model, rotary
from ejkernel_train.operations import choose
from ejkernel_train.sharding import Layout

Array = jax.Array | np.ndarray[Any, Any]

TOKENS = START + 1
"""Bytes and the mark before a document. A model may have more; they are never drawn."""

ADJUSTED = (0, 16, 64, TOKENS)
"""Sizes of A; each has programs of its own."""

TOP = (0, 5, MAX_TOP_LOGPROBS)
"""Numbers of likeliest tokens that a program reports."""


class Pages(NamedTuple):
    """Keys and values `[L * P, T, K, D]`: page p of layer l is row `l P + p`, so that no layer is ever cut out of its array."""

    keys: jax.Array
    values: jax.Array


class Batch(NamedTuple):
    """The tokens of one step, and how the next token of each request is drawn.

    Attributes:
        tokens: int32 `[N]`.
        positions: int32 `[N]`, of each token in its text.
        starts: int32 `[R + 1]`, cumulative numbers of tokens; requests that are not in use have none.
        lengths: int32 `[R]`, tokens of each request after this step.
        tables: int32 `[R, W]`, pages of each request.
        tree: float32 `[R, Q, Q]`, what the first Q new tokens of a request see of each other: see `speculative.tree_bias`. None
            without drafts.
        rows: int32 `[S]`, the tokens after which one is drawn.
        seeds: uint32 `[S, 2]`, the words of a Threefry key.
        drawn: int32 `[S]`, how many tokens the request has drawn before.
        temperature: float32 `[S]`.
        top_k: int32 `[S]`, 0 for all.
        top_p: float32 `[S]`.
        min_p: float32 `[S]`. None: 0.
        adjusted: int32 `[S, A]`, tokens whose logits l become `(l / factor if l > 0 else l * factor) + bias` before one is drawn;
            none twice in a row, -1 where there are fewer. None: none.
        factor, bias: float32 `[S, A]`.
        targets: int32 `[S]`, tokens whose log-probabilities are reported instead of those of the drawn ones; -1: the drawn one's.
            None: -1.
    """

    tokens: Array
    positions: Array
    starts: Array
    lengths: Array
    tables: Array
    tree: Array | None
    rows: Array
    seeds: Array
    drawn: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array | None = None
    adjusted: Array | None = None
    factor: Array | None = None
    bias: Array | None = None
    targets: Array | None = None


class Draws(NamedTuple):
    """What a step has drawn. Log-probabilities are the model's, before adjustments, temperature and filters.

    Attributes:
        tokens: int32 `[S]`; -1 where the logits are not finite.
        logprobs: float32 `[S]`, of them or of `Batch.targets`.
        top_tokens: int32 `[S, top]`, the likeliest first.
        top_logprobs: float32 `[S, top]`.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array | None = None
    top_logprobs: jax.Array | None = None


class Weights(NamedTuple):
    """A model as its products read it, and cosine and sine `[positions, D / 2]`."""

    model: Model
    cos: jax.Array
    sin: jax.Array


def prepare(model: Model, dtype: str, positions: int) -> Weights:
    """Parameters in the dtype of the products.

    Raises:
        ValueError: the model keeps something else than the keys and values of attention, or has fewer than `TOKENS` tokens.
    """
    config = model.config
    others = sorted({*config.pattern} - {"attention", "gated_attention"})
    if others:
        raise ValueError(f"the model has blocks of {', '.join(others)}, whose states have no pages; serve llama or moe")
    if config.vocabulary < TOKENS:
        raise ValueError(f"the model has a vocabulary of {config.vocabulary}; bytes and a mark need {TOKENS}")
    copy = eqx.tree_at(lambda model: model.embedding, model.compute_copy(dtype), model.embedding.astype(dtype))
    if model.head is not None:
        copy = eqx.tree_at(lambda model: model.head, copy, model.head.astype(dtype))
    return Weights(copy, *rotary(config, positions))


def empty_pages(config: ModelConfig, pages: int, page_size: int, dtype: str) -> Pages:
    shape = config.layers * pages, page_size, config.key_heads, config.head_size
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def step(weights: Weights, pages: Pages, batch: Batch, top: int = 0) -> tuple[Pages, Draws]:
    """Compute the new tokens, and draw what comes after some of them; report so many of the likeliest there.

    Returns:
        The pages with the new tokens' keys and values, in place if they are donated; what was drawn.
    """
    model = weights.model
    cos, sin = weights.cos[batch.positions], weights.sin[batch.positions]
    per_layer = len(pages.keys) // model.config.layers

    def repeat(carry: tuple[jax.Array, Pages, jax.Array], blocks: tuple[Block, ...]) -> tuple[Any, None]:
        x, pages, layer = carry
        for block in blocks:
            x, pages = _block(block, x, (cos, sin), pages, batch, layer * per_layer)
            layer = layer + 1
        return (x, pages, layer), None

    start = model.embedding[batch.tokens][None], pages, jnp.zeros((), jnp.int32)
    (x, pages, _), _ = jax.lax.scan(repeat, start, model.blocks)
    rows = choose("ejkernel").rms_norm(x[0, batch.rows], model.norm, model.config.epsilon)
    logits = jnp.einsum("sd,vd->sv", rows, model.output)
    return pages, _draw(logits, batch, top)


def _block(
    block: Block, x: jax.Array, angles: tuple[jax.Array, jax.Array], pages: Pages, batch: Batch, first: jax.Array
) -> tuple[jax.Array, Pages]:
    """A block on the stream `[1, N, d]`; its pages begin at row `first`."""
    where = batch.lengths, batch.tables + first, batch.starts
    written = pages

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:  # [1, N, heads, D] each
        nonlocal written
        written = Pages(*ejkernel.paged_cache_update(key[0], value[0], *pages, *where))
        return ejkernel.unified_attention(query[0], *written, *where, qq_bias=batch.tree)[None]

    operations = choose("ejkernel")._replace(attention=attention)
    x, _ = block(x, Context(operations, Layout(), *angles))
    return x, written


def _draw(logits: jax.Array, batch: Batch, top: int) -> Draws:
    """From `[S, V]`, each with a key of its request's seed and of how many tokens that has drawn."""

    def key(seed: Any, drawn: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)

    possible = jnp.arange(logits.shape[-1]) < TOKENS
    drawn = ejkernel.sample_tokens(
        _adjust(logits, batch),
        jax.vmap(key)(batch.seeds, batch.drawn),
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        min_p=batch.min_p,
        token_mask=possible,
    )
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    reported = drawn if batch.targets is None else jnp.where(batch.targets < 0, drawn, batch.targets)
    found = jnp.take_along_axis(logprobs, reported.clip(min=0)[:, None], axis=1)[:, 0]
    if not top:
        return Draws(drawn, found)
    likeliest, tokens = jax.lax.top_k(jnp.where(possible, logprobs, -jnp.inf), top)
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
