"""What engines are held against: full attention over one request alone, by the trainer's own forward pass in plain JAX."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_serve.grammar import Guide
from ejkernel_serve.vocabulary import TOKENS
from ejkernel_train.model import Model, rotary
from ejkernel_train.operations import choose
from ejkernel_train.parts import Context
from ejkernel_train.sharding import Layout


@functools.cache
def _logits(model_config: Any, length: int) -> Callable[[Model, jax.Array], jax.Array]:
    operations = choose("plain")

    def forward(model: Model, tokens: jax.Array) -> jax.Array:
        context = Context(operations, Layout(), *rotary(model_config, length))
        x = model.embedding[tokens][None]
        for repeat in range(model_config.repeats):
            for block in jax.tree.map(operator.itemgetter(repeat), model.blocks):
                x, _ = block(x, context)
        head = model.embedding if model.head is None else model.head
        return operations.rms_norm(x[0], model.norm, model_config.epsilon) @ head.T

    return jax.jit(forward)


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    """Of the next token, `[V]`. What stands after the tokens is not seen."""
    return all_logits(model, tokens)[-1]


def all_logits(model: Model, tokens: list[int]) -> np.ndarray:
    """Of what comes after each token, `[N, V]`."""
    padded = np.zeros(64, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(model.config, 64)(model, jnp.asarray(padded)))[: len(tokens)]


def logprobs(model: Model, tokens: list[int]) -> np.ndarray:
    """Of what comes after each token, `[N, V]`."""
    found = all_logits(model, tokens).astype(np.float64)
    found -= found.max(-1, keepdims=True)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def greedy(model: Model, prompt: list[int], number: int = 12) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + number and (tokens == prompt or tokens[-1] != 256):
        tokens.append(int(logits(model, tokens)[:TOKENS].argmax()))
    return tokens[len(prompt) :]


def allowed(guide: Guide, size: int = TOKENS) -> list[int]:
    """The tokens that may come next."""
    words = guide.allowed()
    assert words.shape == (-(-size // 32),)
    return np.unpackbits(words.view(np.uint8), count=size, bitorder="little").nonzero()[0].tolist()


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[256, *rng.integers(0, 256, rng.integers(1, 40)).tolist()] for _ in range(number)]
