"""Random inputs for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, suggestion
from ejkernel.utils.checks import integer

_METHODS = ("cauchy", "exponential", "gumbel", "laplace", "logistic", "normal", "uniform")
_calls = itertools.count()


def _key(seed: int | None, key: Any) -> Any:
    if key is not None and seed is not None:
        raise invalid("seed and key", "both", "one of them")
    return jax.random.key(0 if seed is None else seed) if key is None else key


def numeric_gen(*shape: int, dtype: Any = jnp.float16, method: str = "normal", seed: int | None = None, key: Any = None) -> Any:
    """A random array.

    Args:
        *shape: its sizes.
        dtype: a floating dtype or its name; numbers are drawn in float32 and rounded.
        method: a distribution of `jax.random` that needs no parameters, e.g. "normal" or "uniform".
        seed: fixes the numbers; likewise `key`. With neither, calls differ from each other, and their order in the process
            determines the numbers.
    """
    if method not in _METHODS:
        raise invalid("method", repr(method), f"one of {', '.join(_METHODS)}{suggestion(method, _METHODS)}")
    if seed is None and key is None:
        key = jax.random.fold_in(jax.random.key(0), next(_calls))
    return getattr(jax.random, method)(_key(seed, key), shape, jnp.float32).astype(dtype)


@dataclasses.dataclass(frozen=True)
class VarlenMetadata:
    """What `flash_attn_varlen` needs besides the arrays.

    Attributes:
        cu_seqlens_q: int32 `[batch + 1]`.
        cu_seqlens_k: int32 `[batch + 1]`.
        max_seqlens_q: the longest query sequence.
        max_seqlens_k: the longest key sequence.
        sm_scale: `head_dim ** -0.5`.
        layout: "thd": tokens, heads, channels.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlens_q: int
    max_seqlens_k: int
    sm_scale: float
    layout: str = "thd"


def varlen_input_helper(
    batch_size: int,
    qheads: int,
    kvheads: int,
    qseqlen: int,
    kseqlen: int,
    head_dim: int,
    dtype: Any = jnp.float16,
    equal_seqlens: bool = False,
    *,
    seed: int | None = None,
    key: Any = None,
) -> tuple[Any, Any, Any, VarlenMetadata]:
    """Packed random queries, keys and values, and their metadata.

    Args:
        batch_size: number of sequences.
        qheads: query heads; likewise `kvheads`.
        qseqlen: bound on the sum of query lengths: each is in [1, qseqlen // batch_size]; likewise `kseqlen`.
        head_dim: channels per head.
        dtype: of the arrays.
        equal_seqlens: every sequence has the largest length.
        seed: fixes lengths and numbers; 0 if neither it nor `key` is given.

    Returns:
        q `[Nq, qheads, head_dim]`, k and v `[Nk, kvheads, head_dim]`, and a `VarlenMetadata`.

    >>> q, k, v, metadata = varlen_input_helper(2, 4, 2, 16, 32, 8, equal_seqlens=True)
    >>> q.shape, k.shape, metadata.cu_seqlens_k.tolist(), metadata.max_seqlens_q
    ((16, 4, 8), (32, 2, 8), [0, 16, 32], 8)
    """
    integer("batch_size", batch_size, 1)
    for name, value in (("qseqlen", qseqlen), ("kseqlen", kseqlen)):
        integer(name, value, batch_size)
    keys = jax.random.split(_key(seed, key), 5)
    query_lengths, key_lengths = (
        np.full(batch_size, most) if equal_seqlens else np.asarray(jax.random.randint(part, (batch_size,), 1, most + 1))
        for part, most in zip(keys, (qseqlen // batch_size, kseqlen // batch_size), strict=False)
    )
    queries, keys_shape = (int(query_lengths.sum()), qheads, head_dim), (int(key_lengths.sum()), kvheads, head_dim)
    q = numeric_gen(*queries, dtype=dtype, key=keys[2])
    k, v = (numeric_gen(*keys_shape, dtype=dtype, key=part) for part in (keys[3], keys[4]))
    metadata = VarlenMetadata(
        cu_seqlens_q=_cumulative(query_lengths),
        cu_seqlens_k=_cumulative(key_lengths),
        max_seqlens_q=int(query_lengths.max()),
        max_seqlens_k=int(key_lengths.max()),
        sm_scale=head_dim**-0.5,
    )
    return q, k, v, metadata


def _cumulative(lengths: np.ndarray) -> Any:
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)


def generate_block_indices(
    batch: int,
    sequence_length: int,
    kv_heads: int,
    num_blocks_per_token: int,
    block_size: int,
    seed: int | None = 42,
    *,
    key: Any = None,
) -> Any:
    """Random causal key blocks for sparse attention, the same for every token of a query block.

    Args:
        batch: B.
        sequence_length: T, in tokens; the last block may be shorter than the others.
        kv_heads: K.
        num_blocks_per_token: S, how many blocks each token names.
        block_size: tokens per block.
        seed: fixes the choice; not used if `key` is given.

    Returns:
        int32 `[B, T, K, S]`: ascending numbers of blocks that begin at or before the token, then -1 where there are fewer.

    >>> generate_block_indices(1, 3, 1, 2, 2)[0, :, 0].tolist()
    [[0, -1], [0, -1], [0, 1]]
    """
    named = {
        "batch": batch,
        "sequence_length": sequence_length,
        "kv_heads": kv_heads,
        "num_blocks_per_token": num_blocks_per_token,
    }
    for name, value in named.items():
        integer(name, value, 0)
    integer("block_size", block_size, 1)
    chosen = jax.random.key(42 if seed is None else seed) if key is None else key
    count = -(-sequence_length // block_size)
    blocks = jnp.arange(count, dtype=jnp.int32)
    own = blocks[None, :, None, None]
    scores = jnp.where(blocks[None, None, None] <= own, jax.random.uniform(chosen, (batch, count, kv_heads, count)), 2.0)
    ranked = jnp.argsort(scores, axis=-1)[..., :num_blocks_per_token].astype(jnp.int32)
    ranked = jnp.pad(ranked, [(0, 0)] * 3 + [(0, num_blocks_per_token - ranked.shape[-1])], constant_values=count)
    ranked = jnp.sort(jnp.where(ranked <= own, ranked, count), axis=-1)
    return jnp.repeat(jnp.where(ranked < count, ranked, -1), block_size, axis=1)[:, :sequence_length]
