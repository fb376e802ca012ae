"""What a step computes on the device: the trainer's own blocks, with attention that writes and reads pages.

Shapes: N tokens of all requests one after the other, R requests, W pages of the longest one, S tokens that are drawn, A logits of
each that are adjusted; P pages of each of L layers with attention, of T tokens, K key heads and D channels; M slots for the states
of requests in each layer with a recurrence.

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
from ejkernel_train.mixers import DeltaRule
from ejkernel_train.model import Model, rotary
from ejkernel_train.operations import choose
from ejkernel_train.parts import Context
from ejkernel_train.sharding import Layout

Array = jax.Array | np.ndarray[Any, Any]

PAGED, STATEFUL = ("attention", "window_attention", "gated_attention"), ("delta_rule",)
"""Mixers whose past is in pages, and those who have a state for each request."""

TOP = (0, 5, MAX_TOP_LOGPROBS)
"""Numbers of likeliest tokens that a program reports."""


def adjusted_sizes(tokens: int) -> tuple[int, ...]:
    """Sizes of A of a vocabulary; each has programs of its own."""
    return (0, *(size for size in (16, 64, 256, 1024, 4096, 16384) if 2 * size <= tokens), tokens)


class Pages(NamedTuple):
    """Keys and values `[L * P, T, K, D]`: page p of layer l is row `l P + p`, so that no layer is ever cut out of its array.

    Attributes:
        states: float32, of delta rules, one for each slot: slot m of layer l is row `l M + m`. None for models without.
        inputs: the last inputs of their short convolutions, in the same rows.
    """

    keys: jax.Array
    values: jax.Array
    states: jax.Array | None = None
    inputs: jax.Array | None = None


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
        slots: int32 `[R]`, the slot of each request's states; -1: none. None of models without states.
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
    slots: Array | None = None


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
        ValueError: the model keeps something else than keys and values of attention and states of delta rules, or has fewer
            tokens.
    """
    config = model.config
    others = sorted({*config.pattern} - {*PAGED, *STATEFUL})
    if others:
        raise ValueError(f"the model has blocks of {', '.join(others)}, whose states have no slots; serve llama, moe or hybrid")
    if config.vocabulary < tokens:
        raise ValueError(f"the model has a vocabulary of {config.vocabulary}; bytes and a mark need {tokens}")
    layers = tuple(layers_of(model.compute_copy(dtype)))
    embedding, head = model.embedding.astype(dtype), None if model.head is None else model.head.astype(dtype)
    return Weights(embedding, layers, model.norm, head, *rotary(config, positions), config.epsilon, tokens)


def empty_pages(config: ModelConfig, pages: int, page_size: int, dtype: str, slots: int = 0) -> Pages:
    recurrent = sum(mixer in STATEFUL for mixer in config.pattern) * config.repeats
    shape = (config.layers - recurrent) * pages, page_size, config.key_heads, config.head_size
    keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    if not recurrent:
        return Pages(keys, values)
    size, number = config.linear_head_size, config.linear_heads
    states = jnp.zeros((recurrent * slots, number, size, size), jnp.float32)
    inputs = recurrent * slots, config.filter - 1, size * (number + 2 * config.linear_key_heads)
    return Pages(keys, values, states, jnp.zeros(inputs, dtype))


def step(weights: Weights, pages: Pages, batch: Batch, top: int = 0, begins: bool = True) -> tuple[Pages, Draws]:
    """Compute the new tokens, and draw what comes after some of them; report so many of the likeliest there.

    `begins`: requests may begin in this step, whose states are 0 whatever their slots hold.

    Returns:
        The pages with the new tokens' keys and values, in place if they are donated; what was drawn.
    """
    angles = weights.cos[batch.positions], weights.sin[batch.positions]
    x = weights.embedding[batch.tokens][None]
    run = jax.jit(_block, static_argnames="begins")  # so that the layers are traced and lowered once
    for layer, first in zip(weights.layers, _first_rows(weights.layers, pages), strict=True):
        x, pages = run(layer, x, angles, pages, batch, jnp.int32(first), begins=begins)
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
        pages, draws = step(weights, pages, batch, top, begins=False)
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


def _first_rows(layers: Sequence[Layer], pages: Pages) -> list[int]:
    """Of every layer, among the pages or among the states."""
    recurrent = [isinstance(layer.block.mixer, DeltaRule) for layer in layers]
    kept = {False: len(pages.keys), True: 0 if pages.states is None else len(pages.states)}
    return [recurrent[:number].count(kind) * (kept[kind] // recurrent.count(kind)) for number, kind in enumerate(recurrent)]


def _block(
    layer: Layer,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    pages: Pages,
    batch: Batch,
    first: jax.Array,
    begins: bool,
) -> tuple[jax.Array, Pages]:
    """A layer on the stream `[1, N, d]`; its pages, or its states, begin at row `first`."""
    kept = _Kept(pages, batch, first, begins)
    operations = choose("ejkernel")._replace(
        attention=kept.attention, causal_conv1d=kept.causal_conv1d, gated_delta_rule=kept.gated_delta_rule
    )
    return layer(x, Context(operations, Layout(), *angles)), kept.pages


class _Kept:
    """Operations of one layer that go on from what earlier steps have kept; `pages` is what comes after them."""

    def __init__(self, pages: Pages, batch: Batch, first: jax.Array, begins: bool) -> None:
        self.pages, self._batch, self._first, self._begins = pages, batch, first, begins

    def attention(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, sinks: jax.Array | None = None, window: int = 0
    ) -> jax.Array:
        """`[1, N, heads, D]` each."""
        batch, before = self._batch, self.pages
        where = batch.lengths, batch.tables + self._first, batch.starts
        keys, values = ejkernel.paged_cache_update(key[0], value[0], before.keys, before.values, *where)
        self.pages = before._replace(keys=keys, values=values)
        options: dict[str, Any] = {"softmax_aux": sinks, "sliding_window": window or None}
        return ejkernel.unified_attention(query[0], keys, values, *where, qq_bias=batch.tree, **options)[None]

    def causal_conv1d(self, x: jax.Array, weight: jax.Array, documents: None = None) -> jax.Array:
        """`[1, N, C]`."""
        inputs = self.pages.inputs
        assert inputs is not None
        rows = self._rows(len(inputs))
        before = inputs.at[rows].get(mode="fill", fill_value=0)
        if self._begins:
            before = jnp.where(self._new()[:, None, None], 0, before)
        out, after = ejkernel.causal_conv1d(
            x,
            weight,
            activation="silu",
            initial_state=before.astype(x.dtype),
            return_state=True,
            cu_seqlens=self._batch.starts,
        )
        self.pages = self.pages._replace(inputs=inputs.at[rows].set(after.astype(inputs.dtype), mode="drop"))
        return out

    def gated_delta_rule(
        self, query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, decay: jax.Array, documents: None = None
    ) -> jax.Array:
        """`[1, N, heads, ...]` each."""
        states = self.pages.states
        assert states is not None
        rows = self._rows(len(states))
        if self._begins:
            states = states.at[jnp.where(self._new(), rows, len(states))].set(0, mode="drop")
        slots = jnp.where(rows < len(states), rows, -1)
        out, states = ejkernel.ragged_gated_delta_rule(
            query[0], key[0], value[0], beta[0], decay[0], states, self._batch.starts, slots
        )
        self.pages = self.pages._replace(states=states)
        return out[None]

    def _rows(self, number: int) -> jax.Array:
        """Of each request, beyond the last one for none."""
        slots = jnp.asarray(self._batch.slots)
        return jnp.where(slots < 0, number, slots + self._first)

    def _new(self) -> jax.Array:
        """Which requests begin: their first token in this step is that of their text."""
        starts, positions = jnp.asarray(self._batch.starts), jnp.asarray(self._batch.positions)
        return (starts[1:] > starts[:-1]) & (positions.at[starts[:-1]].get(mode="clip") == 0)


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
