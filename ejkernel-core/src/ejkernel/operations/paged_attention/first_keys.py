"""Windows and chunks that only the running program knows, as the first key that each token may see."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_shape
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import is_traced, traced_count


def traced_limits(window: Any, chunk_size: Any, causal: bool) -> tuple[Any, Any]:
    """The last keys that a token sees and the size of its chunk, where the running program knows them; else None."""
    if is_traced(chunk_size) and not causal:
        raise invalid("chunk_size", "a traced value", "None without causal")
    return (
        traced_count("sliding_window", window, 1) if is_traced(window) else None,
        traced_count("chunk_size", chunk_size, 1) if is_traced(chunk_size) else None,
    )


def first_keys_of(given: Any, window: Any, chunk_size: Any, starts: Any, lengths: Any, tokens: int) -> Any:
    """The first key that each token may see, int32 `[1, N]`, from what is given `[N]`, a traced window and chunk; None for all.

    Args:
        given: int `[N]`, or None.
        window, chunk_size: int32 scalars, or None.
        starts, lengths: of the requests, int32 `[1, R + 1]` and `[1, R]`.
        tokens: N.
    """
    found: list[Any] = []
    if given is not None:
        check_shape("first_keys", given, (tokens,), "[N]")
        if not jnp.issubdtype(given.dtype, jnp.integer):
            raise wrong_type("first_keys", f"dtype {given.dtype}", "integers")
        found.append(as_int32(given))
    if window is not None or chunk_size is not None:
        positions = _positions(starts[0], lengths[0], tokens)
        found += [] if window is None else [positions - (window - 1)]
        found += [] if chunk_size is None else [positions // chunk_size * chunk_size]
    return functools.reduce(jnp.maximum, found)[None] if found else None


def _positions(starts: Any, lengths: Any, tokens: int) -> Any:
    """Where each token is in its request, int32 `[N]`; what tokens of no request get does not matter."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    if not lengths.shape[0]:
        return token
    request = jnp.clip(jnp.searchsorted(starts[1:], token, side="right"), 0, lengths.shape[0] - 1)
    return token - starts[1:][request] + lengths[request]
