"""One chunk as matmuls: its outputs, and the state after it, from the state before it.

No exponent is a difference of sums: each is a sum of the log decays between two tokens, so it is not positive if they are not,
and a strong decay costs weak ones no precision. Scalar decays (per head) weight the scores of a chunk. Decays per channel
cannot be factored out of the matmuls; they are applied pair by pair within blocks, and across blocks as one factor up to the
block boundary on either side (Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023).

0/1 matrices are computed inside the program: `custom_partitioning` does not accept constants.

Axes: x batch, i and j tokens of a chunk (query and key), k group of heads, r head of a group, d key channel, v value channel; a and
b blocks, then i and j tokens of a block. Axes x and r of an array may have size 1.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel.utils.dtypes import common_dtype
from ejkernel_xla._numerics import dot_precision, finite, first_nonfinite, nan_where


class Tokens(NamedTuple):
    """The arrays of a chunk: query, key, value `[x,i,k,r,c]`, g `[x,i,k,r]`, gk and gv `[x,i,k,r,c]`, value_scale
    `[x,i,k,r]`, which `Chunk` finds in the value."""

    query: Any
    key: Any
    value: Any
    g: Any = None
    gk: Any = None
    gv: Any = None
    value_scale: Any = None


class Shared(NamedTuple):
    """What all tokens share: g_gamma `[x,k,r]`, bonus `[x,k,r,d]`, skip `[x,k,r,1 or v]`."""

    g_gamma: Any = None
    bonus: Any = None
    skip: Any = None


class _Logs(NamedTuple):
    """Log decays per token: scalar `[x,i,k,r]`, or in its place per key channel and per value channel `[x,i,k,r,c]`."""

    scalar: Any
    key: Any
    value: Any


class _Nonfinite(NamedTuple):
    """The first token at which a NaN enters the state, the chunk's size where none does, `[x,1,k,r,c]`.

    rows: for each key channel, or 1 for all of them; columns: for each value channel.
    """

    rows: Any
    columns: Any


class Chunk:
    """The arithmetic of the chunks of one call."""

    def __init__(self, call: LinearRecurrenceCall, size: int, block: int) -> None:
        self.call, self.size, self.block = call, size, block
        self.exclusive = call.bonus is not None
        dtype = common_dtype(call.query.dtype, call.key.dtype, call.value.dtype)
        self.dot = functools.partial(jnp.einsum, precision=dot_precision(call.precision, dtype))

    def run(self, state: Any, tokens: Tokens, shared: Shared, valid: Any) -> tuple[Any, Any]:
        """The state after the chunk and its outputs `[x,i,k,r,v]`. Tokens that are not valid must be 0."""
        tokens, nonfinite = _finite(tokens)
        logs = self._logs(tokens, shared, valid)
        out = self._read(state, tokens, shared, logs)
        first = jnp.minimum(jnp.min(nonfinite.rows, axis=-1, keepdims=True, initial=self.size), nonfinite.columns)
        index = jax.lax.broadcasted_iota(jnp.int32, (1, self.size, 1, 1, 1), 1)
        return self._advance(state, tokens, logs, nonfinite), out + nan_where(index >= first, out.dtype)

    def advance(self, state: Any, tokens: Tokens, shared: Shared, valid: Any) -> Any:
        """The state after the chunk."""
        tokens, nonfinite = _finite(tokens)
        return self._advance(state, tokens, self._logs(tokens, shared, valid), nonfinite)

    def _logs(self, tokens: Tokens, shared: Shared, valid: Any) -> _Logs:
        scalar = tokens.g
        if shared.g_gamma is not None:
            exists = jnp.ones((1, self.size)) if valid is None else valid
            constant = shared.g_gamma[:, None] * exists[:, :, None, None].astype(shared.g_gamma.dtype)
            scalar = constant if scalar is None else scalar + constant
        key, value = tokens.gk, tokens.gv
        if scalar is not None and key is not None:
            return _Logs(None, key + scalar[..., None], value)
        if scalar is not None and value is not None:
            return _Logs(None, key, value + scalar[..., None])
        return _Logs(scalar, key, value)

    def _advance(self, state: Any, tokens: Tokens, logs: _Logs, nonfinite: _Nonfinite) -> Any:
        key, value = tokens.key, tokens.value
        later = _later(self.size)
        if logs.scalar is not None:
            value = value * jnp.exp(_sums(later, logs.scalar))[..., None]
            state = state * jnp.exp(jnp.sum(logs.scalar, axis=1))[..., None, None]
        if logs.value is not None:
            value = value * jnp.exp(_sums(later, logs.value))
            state = state * jnp.exp(jnp.sum(logs.value, axis=1))[..., None, :]
        if logs.key is not None:
            key = key * jnp.exp(_sums(later, logs.key))
            state = state * jnp.exp(jnp.sum(logs.key, axis=1))[..., :, None]
        spread = (nonfinite.rows[:, 0, ..., None] < self.size) | (nonfinite.columns[:, 0, :, :, None] < self.size)
        return state + self.dot("xjkrd,xjkrv->xkrdv", key, value) + nan_where(spread, state.dtype)

    def _read(self, state: Any, tokens: Tokens, shared: Shared, logs: _Logs) -> Any:
        query = tokens.query * self.call.softmax_scale
        earlier = _earlier(self.size, self.exclusive)
        decayed = query if logs.key is None else query * jnp.exp(_sums(earlier, logs.key))
        out = self.dot("xikrd,xkrdv->xikrv", decayed, state)
        if logs.scalar is not None:
            out = out * jnp.exp(_sums(earlier, logs.scalar))[..., None]
        if logs.value is not None:
            out = out * jnp.exp(_sums(earlier, logs.value))
        return out + self._weighted(self._scores(query, tokens, shared, logs), tokens.value, logs.value)

    def _scores(self, query: Any, tokens: Tokens, shared: Shared, logs: _Logs) -> Any:
        """What query i takes of value j, decays per value channel apart `[x,k,r,i,j]`."""
        if logs.key is None:
            scores = self.dot("xikrd,xjkrd->xkrij", query, tokens.key)
            if logs.scalar is not None:
                scores = scores * jnp.exp(self._pair_sums(logs.scalar))
        else:
            scores = self._block_scores(query, tokens.key, logs.key)
        order = jnp.arange(self.size)
        visible = order[:, None] > order[None] if self.exclusive else order[:, None] >= order[None]
        scores = jnp.where(visible, scores, 0)
        if shared.bonus is None:
            return scores
        own = jnp.sum(query * tokens.key * shared.bonus[:, None], axis=-1)
        return scores + jnp.where(jnp.eye(self.size, dtype=bool), jnp.moveaxis(own, 1, -1)[..., None], 0)

    def _pair_sums(self, scalar: Any) -> Any:
        """Sums of the log decays between token j and query i `[x,k,r,i,j]`."""
        earlier = _earlier(self.size, self.exclusive).astype(scalar.dtype)[None, None, None]
        return _exact("xkril,jl->xkrij", jnp.moveaxis(scalar, 1, -1)[..., None, :] * earlier, _later(self.size))

    def _block_scores(self, query: Any, key: Any, logs: Any) -> Any:
        query, key, logs = (self._blocks(array) for array in (query, key, logs))
        within = self._within(logs)
        scores = jnp.sum(query[:, :, :, None] * key[:, :, None] * jnp.exp(within), axis=-1)
        scores = jnp.moveaxis(scores, (4, 5), (1, 2))[..., None, :]
        blocks = self.size // self.block
        if blocks > 1:
            query = query * jnp.exp(_block_sums(_earlier(self.block, self.exclusive), logs))
            key = key[:, None] * self._across(logs)
            across = self.dot("xaikrd,xabjkrd->xkraibj", query, key)
            scores = jnp.where(jnp.eye(blocks, dtype=bool)[:, None, :, None], scores, across)
        return scores.reshape(*scores.shape[:3], self.size, self.size)

    def _weighted(self, scores: Any, value: Any, logs: Any) -> Any:
        """Values under scores, and under decays per value channel."""
        if logs is None:
            return self.dot("xkrij,xjkrv->xikrv", scores, value)
        blocks = self.size // self.block
        scores = scores.reshape(*scores.shape[:3], blocks, self.block, blocks, self.block)
        value, logs = self._blocks(value), self._blocks(logs)
        own = _exact("xkraibj,ab->xaijkr", scores, jnp.eye(blocks))
        out = jnp.sum(own[..., None] * value[:, :, None] * jnp.exp(self._within(logs)), axis=3)
        if blocks > 1:
            across = self.dot("xkraibj,xabjkrv->xaikrv", scores, value[:, None] * self._across(logs))
            out = out + across * jnp.exp(_block_sums(_earlier(self.block, self.exclusive), logs))
        return out.reshape(out.shape[0], self.size, *out.shape[3:])

    def _blocks(self, array: Any) -> Any:
        """`[x,i,...]` as `[x,a,i,...]`."""
        return array.reshape(array.shape[0], self.size // self.block, self.block, *array.shape[2:])

    def _within(self, logs: Any) -> Any:
        """Sums of log decays between tokens of one block `[x,a,i,j,k,r,c]`; 0 where j does not come first."""
        return _exact("xalkrc,ijl->xaijkrc", logs, _earlier(self.block, self.exclusive)[:, None] * _later(self.block)[None])

    def _across(self, logs: Any) -> Any:
        """Decay from token j of block b to the start of block a `[x,a,b,j,k,r,c]`; 0 unless b comes before a."""
        blocks = self.size // self.block
        before = jnp.tri(blocks, k=-1)
        between = before[:, None] * _later(blocks)[None]
        gap = _exact("xmkrc,abm->xabkrc", jnp.sum(logs, axis=2), between)
        exponent = gap[:, :, :, None] + _block_sums(_later(self.block), logs)[:, None]
        first = (before > 0)[:, :, None, None, None, None]
        return jnp.where(first, jnp.exp(jnp.where(first, exponent, 0)), 0)


def _finite(tokens: Tokens) -> tuple[Tokens, _Nonfinite]:
    """NaN-safe path: what enters matmuls over the tokens of a chunk is finite, since 0 * NaN would spread to earlier tokens. NaN is
    added to what comes after. A query reaches its own token only."""
    key, value, g, gk, gv = tokens[1:6]
    rows, columns = first_nonfinite(key, 1, of_all_channels=False), first_nonfinite(value, 1, of_all_channels=False)
    if g is not None:
        rows = jnp.minimum(rows, first_nonfinite(g[..., None], 1, of_all_channels=False))
    if gk is not None:
        rows = jnp.minimum(rows, first_nonfinite(gk, 1, of_all_channels=False))
    if gv is not None:
        columns = jnp.minimum(columns, first_nonfinite(gv, 1, of_all_channels=False))
    return Tokens(tokens.query, *jax.tree.map(finite, tokens[1:])), _Nonfinite(rows, columns)


def _earlier(size: int, exclusive: bool) -> Any:
    """`[i, l]`: 1 where the decay of token l acts before query i reads."""
    return jnp.tri(size, k=-1 if exclusive else 0)


def _later(size: int) -> Any:
    """`[j, l]`: 1 where token l comes after token j."""
    return jnp.tri(size, k=-1).T


def _exact(equation: str, values: Any, selection: Any) -> Any:
    """A product with an array of zeros and ones, in full precision: a sum."""
    return jnp.einsum(equation, values, selection.astype(values.dtype), precision=jax.lax.Precision.HIGHEST)


def _sums(matrix: Any, logs: Any) -> Any:
    """Sums over tokens l, `[x,l,...]`, that a matrix `[i, l]` selects."""
    flat = _exact("xlc,il->xic", logs.reshape(*logs.shape[:2], math.prod(logs.shape[2:])), matrix)
    return flat.reshape(logs.shape)


def _block_sums(matrix: Any, logs: Any) -> Any:
    """The same in every block, `[x,a,l,...]`."""
    flat = _exact("xalc,il->xaic", logs.reshape(*logs.shape[:3], math.prod(logs.shape[3:])), matrix)
    return flat.reshape(logs.shape)
