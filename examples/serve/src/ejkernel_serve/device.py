"""What a step computes on the device: the trainer's own blocks, with attention that writes and reads pages.

Shapes: N tokens of all requests one after the other, R requests, W pages of the longest one; P pages of each of L layers, of S
tokens, K key heads and D channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel_train.config import ModelConfig
from ejkernel_train.data import START
from ejkernel_train.model import Block, Context, Model, compute_copy, rotary
from ejkernel_train.operations import choose
from ejkernel_train.sharding import Layout

Array = jax.Array | np.ndarray[Any, Any]

TOKENS = START + 1
"""Bytes and the mark before a document. A model may have more; they are never drawn."""


class Pages(NamedTuple):
    """Keys and values `[L * P, S, K, D]`: page p of layer l is row `l P + p`, so that no layer is ever cut out of its array."""

    keys: jax.Array
    values: jax.Array


class Batch(NamedTuple):
    """The tokens of one step, and how the next token of each request is drawn.

    Attributes:
        tokens: int32 `[N]`.
        starts: int32 `[R + 1]`, cumulative numbers of tokens; requests that are not in use have none.
        lengths: int32 `[R]`, tokens of each request after this step.
        tables: int32 `[R, W]`, pages of each request.
        seeds: uint32 `[R, 2]`, the words of a Threefry key.
        drawn: int32 `[R]`, how many tokens the request has drawn already.
        temperature: float32 `[R]`.
        top_k: int32 `[R]`, 0 for all.
        top_p: float32 `[R]`.
    """

    tokens: Array
    starts: Array
    lengths: Array
    tables: Array
    seeds: Array
    drawn: Array
    temperature: Array
    top_k: Array
    top_p: Array


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
    new = compute_copy(model.blocks, dtype), model.embedding.astype(dtype)
    return Weights(eqx.tree_at(lambda model: (model.blocks, model.embedding), model, new), *rotary(positions, config.head_size))


def empty_pages(config: ModelConfig, pages: int, page_size: int, dtype: str) -> Pages:
    shape = config.layers * pages, page_size, config.key_heads, config.head_size
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def step(weights: Weights, pages: Pages, batch: Batch) -> tuple[Pages, jax.Array, jax.Array]:
    """Compute the new tokens, and draw the next one of each request.

    Returns:
        The pages with the new tokens' keys and values, in place if they are donated. int32 `[R]`, the token that each request
        draws. float32 `[R]`, its log-probability by the model, before temperature and filters. Of a request whose prompt is not
        at its end, and of one without tokens, the latter two mean nothing.
    """
    model, (position, last) = weights.model, _places(batch, len(weights.cos))
    cos, sin = weights.cos[position], weights.sin[position]
    per_layer = len(pages.keys) // model.config.layers

    def repeat(carry: tuple[jax.Array, Pages, jax.Array], blocks: tuple[Block, ...]) -> tuple[Any, None]:
        x, pages, layer = carry
        for block in blocks:
            x, pages = _block(block, x, (cos, sin), pages, batch, layer * per_layer)
            layer = layer + 1
        return (x, pages, layer), None

    start = model.embedding[batch.tokens][None], pages, jnp.zeros((), jnp.int32)
    (x, pages, _), _ = jax.lax.scan(repeat, start, model.blocks)
    rows = choose("ejkernel").rms_norm(x[0, last], model.norm)
    logits = jnp.einsum("rd,vd->rv", rows, model.embedding)
    return pages, *_draw(logits, batch)


def _places(batch: Batch, positions: int) -> tuple[jax.Array, jax.Array]:
    """The position of each token in its request `[N]`, and the last token of each request `[R]`."""
    number, starts, lengths = jnp.arange(len(batch.tokens)), jnp.asarray(batch.starts), jnp.asarray(batch.lengths)
    owner = jnp.searchsorted(starts[1:], number, side="right").clip(max=len(lengths) - 1)
    position = lengths[owner] - starts[owner + 1] + number
    return position.clip(0, positions - 1), (starts[1:] - 1).clip(min=0)


def _block(
    block: Block, x: jax.Array, angles: tuple[jax.Array, jax.Array], pages: Pages, batch: Batch, first: jax.Array
) -> tuple[jax.Array, Pages]:
    """A block on the stream `[1, N, d]`; its pages begin at row `first`."""
    where = batch.lengths, batch.tables + first, batch.starts
    written = pages

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:  # [1, N, heads, D] each
        nonlocal written
        written = Pages(*ejkernel.paged_cache_update(key[0], value[0], *pages, *where))
        return ejkernel.unified_attention(query[0], *written, *where)[None]

    operations = choose("ejkernel")._replace(attention=attention)
    x, _ = block(x, Context(operations, Layout(), *angles))
    return x, written


def _draw(logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """From `[R, V]`, with a key for each request of its seed and of how many tokens it has drawn."""

    def key(seed: Any, drawn: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), drawn)

    drawn = ejkernel.sample_tokens(
        logits,
        jax.vmap(key)(batch.seeds, batch.drawn),
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        token_mask=jnp.arange(logits.shape[-1]) < TOKENS,
    )
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return drawn, jnp.take_along_axis(logprobs, drawn.clip(min=0)[:, None], axis=1)[:, 0]
