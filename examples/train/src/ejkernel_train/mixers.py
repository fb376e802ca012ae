"""Token mixers: attention, and recurrences over states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel_train.config import ModelConfig
from ejkernel_train.operations import Operations
from ejkernel_train.parts import Arrays, Context, Linear, heads, matrix
from ejkernel_train.sharding import BATCH


class Attention(eqx.Module):
    """Causal attention with grouped key heads and rotary positions, as in Llama; with normed heads as in Qwen3; with biases and
    sinks as in gpt-oss.

    Attributes:
        window: tokens that each sees, itself included; 0 for all.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_scale: jax.Array | None
    key_scale: jax.Array | None
    sinks: jax.Array | None
    config: ModelConfig = eqx.field(static=True)
    window: int = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array, window: int = 0) -> None:
        keys = jax.random.split(key, 4)
        inner, shared = config.heads * config.head_size, config.key_heads * config.head_size
        options = config.float8, config.attention_bias
        self.query = Linear(keys[0], config.width, inner, *options)
        self.key = Linear(keys[1], config.width, shared, *options)
        self.value = Linear(keys[2], config.width, shared, *options)
        self.output = Linear(keys[3], inner, config.width, *options)
        self.query_scale, self.key_scale = jnp.ones((2, config.head_size)) if config.qk_norm else (None, None)
        self.sinks = jnp.zeros(config.heads) if config.sinks else None
        self.config = config
        self.window = window

    def project(self, x: jax.Array, context: Context, *others: Linear) -> Arrays:
        """Queries `[B, T, H, D]`, keys and values `[B, T, K, D]`, and x through other layers."""
        query, key, value, *rest = context.project(x, self.query, self.key, self.value, *others)
        return heads(query, self.config.heads), *(heads(each, self.config.key_heads) for each in (key, value)), *rest

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        query, key, value = self.project(x, context)
        return self.output(self.attend(query, key, value, context), context)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context) -> jax.Array:
        """What is between the linear layers: `[B, T, H D]`."""
        if self.query_scale is None:
            query, key = context.operations.rope(query, key, context.cos, context.sin)
        else:
            norms = self.query_scale, self.key_scale, self.config.epsilon
            query, key = context.operations.qk_norm_rope(query, key, context.cos, context.sin, *norms)
        return context.attend(query, key, value, self.sinks, self.window).reshape(*query.shape[:2], -1)


class GatedAttention(eqx.Module):
    """Attention whose heads are normed before they are turned, and whose result has a gate, as in Qwen3-Next."""

    attention: Attention
    gate: Linear
    query_scale: jax.Array
    key_scale: jax.Array

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.attention = Attention(config, first)
        self.gate = Linear(second, config.width, config.heads * config.head_size, config.float8)
        self.query_scale, self.key_scale = jnp.ones((2, config.head_size))

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        query, key, value, gate = self.attention.project(x, context, self.gate)
        norms = self.query_scale, self.key_scale, self.attention.config.epsilon
        query, key = context.operations.qk_norm_rope(query, key, context.cos, context.sin, *norms)
        attended = context.attend(query, key, value).reshape(*x.shape[:2], -1)
        return self.attention.output(attended * jax.nn.sigmoid(gate), context)


class DeltaRule(eqx.Module):
    """The gated delta net of Qwen3-Next: a short convolution, the gated delta rule, and a gated norm of every head."""

    mixed: Linear  # queries, keys and values, which share a convolution
    filters: jax.Array
    z: Linear
    beta: Linear
    decay: Linear
    log_rate: jax.Array
    bias: jax.Array
    norm: jax.Array
    output: Linear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 7)
        inner, shared = (number * config.linear_head_size for number in (config.linear_heads, config.linear_key_heads))
        self.mixed = Linear(keys[0], config.width, inner + 2 * shared, config.float8)
        self.filters = matrix(keys[1], config.filter, inner + 2 * shared, config.filter)
        self.z = Linear(keys[2], config.width, inner, config.float8)
        self.beta = Linear(keys[3], config.width, config.linear_heads)
        self.decay = Linear(keys[4], config.width, config.linear_heads)
        self.log_rate, self.bias = decays(keys[5], config.linear_heads)
        self.norm = jnp.ones(config.linear_head_size)
        self.output = Linear(keys[6], inner, config.width, config.float8)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        projected = *context.project(x, self.mixed, self.z), *context.project(x, self.beta, self.decay)
        own = self.filters, self.log_rate, self.bias, self.norm
        return self.output(by_sequence(self.recur, context, projected, own), context)

    def recur(self, operations: Operations, projected: Arrays, own: Arrays, documents: jax.Array | None) -> jax.Array:
        """What stands between the linear layers: `[B, T, H D]`."""
        (mixed, z, beta, decay), (filters, log_rate, bias, norm) = projected, own
        number, shared = self.config.linear_heads, self.config.linear_key_heads
        mixed = operations.causal_conv1d(mixed, filters, documents)
        size = shared * self.config.linear_head_size
        query, key, value = heads(mixed[..., :size], shared), heads(mixed[..., size : 2 * size], shared), mixed[..., 2 * size :]
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        decay = -jnp.exp(log_rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        out = operations.gated_delta_rule(query, key, heads(value, number), beta, decay, documents)
        return operations.gated_rms_norm(out, heads(z, number), norm, self.config.epsilon).reshape(*z.shape)


class StateSpace(eqx.Module):
    """The layer of Mamba-2: a short convolution, the state space with scalar decays, and a gated norm."""

    mixed: Linear  # x, B and C, which share a convolution
    filters: jax.Array
    z: Linear
    step: Linear
    log_rate: jax.Array
    bias: jax.Array
    skip: jax.Array
    norm: jax.Array
    output: Linear
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        keys = jax.random.split(key, 6)
        inner = config.linear_heads * config.linear_head_size
        channels = inner + 2 * config.groups * config.state_size
        self.mixed = Linear(keys[0], config.width, channels, config.float8)
        self.filters = matrix(keys[1], config.filter, channels, config.filter)
        self.z = Linear(keys[2], config.width, inner, config.float8)
        self.step = Linear(keys[3], config.width, config.linear_heads)
        self.log_rate, self.bias = decays(keys[4], config.linear_heads)
        self.skip = jnp.ones(config.linear_heads)
        self.norm = jnp.ones(inner)
        self.output = Linear(keys[5], inner, config.width, config.float8)
        self.config = config

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        projected = *context.project(x, self.mixed, self.z), self.step(x, context)
        own = self.filters, self.log_rate, self.bias, self.skip, self.norm
        return self.output(by_sequence(self.recur, context, projected, own), context)

    def recur(self, operations: Operations, projected: Arrays, own: Arrays, documents: jax.Array | None) -> jax.Array:
        """What stands between the linear layers: `[B, T, H P]`."""
        (mixed, z, step), (filters, log_rate, bias, skip, norm) = projected, own
        groups, size = self.config.groups, self.config.groups * self.config.state_size
        mixed = operations.causal_conv1d(mixed, filters, documents)
        x = heads(mixed[..., : -2 * size], self.config.linear_heads)
        B, C = heads(mixed[..., -2 * size : -size], groups), heads(mixed[..., -size:], groups)
        return operations.gated_state_space(x, -jnp.exp(log_rate), B, C, skip, step, bias, z, norm, documents)


def by_sequence(function: Callable[..., jax.Array], context: Context, projected: Any, own: Any) -> jax.Array:
    """On a mesh each device runs its own sequences, with all heads: their channels share a convolution, and are not split."""
    run = context.layout.on_each_device(partial(function, context.operations), (P(BATCH), P(), P(BATCH)), P(BATCH))
    return run(projected, own, context.documents)


def decays(key: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Logarithms of rates between 1 and 16, and biases whose softplus is a step between 0.001 and 0.1."""
    first, second = jax.random.split(key)
    steps = jnp.exp(jax.random.uniform(second, (number,), minval=jnp.log(0.001), maxval=jnp.log(0.1)))
    return jnp.log(jax.random.uniform(first, (number,), minval=1.0, maxval=16.0)), steps + jnp.log(-jnp.expm1(-steps))


def window_attention(config: ModelConfig, key: jax.Array) -> Attention:
    return Attention(config, key, config.window)


MIXERS: dict[str, Callable[[ModelConfig, jax.Array], Any]] = {
    "attention": Attention,
    "window_attention": window_attention,
    "gated_attention": GatedAttention,
    "delta_rule": DeltaRule,
    "state_space": StateSpace,
}
