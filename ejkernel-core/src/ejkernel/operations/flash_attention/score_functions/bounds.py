"""Which tiles a mask function empties: by bounds of what it computes where indices alone say, else pair by pair on the device.

Bounds are those of integers and bools over whole tiles, so that a tile counts as empty only if it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operations.flash_attention.score_functions.functions import places_of
from ejkernel.operations.flash_attention.score_functions.record import Constant, Mapped, Ref, Result, Scalar, ScoreFunction

Bounds = tuple[Any, Any]
"""The least and the largest number, float64 arrays that broadcast together; both ends included. Bools are 0 and 1."""

_ANY: Bounds = (np.float64(-np.inf), np.float64(np.inf))
_INT32 = 2.0**31


def static_tiles(function: ScoreFunction, query: Bounds, key: Bounds) -> tuple[Any, Any] | None:
    """Whether each tile of query and key indices has some visible pair, and only visible pairs; None if arrays say it."""
    if function.captures and function.loads:
        return None
    known: dict[Ref, Bounds] = {Scalar("query"): query, Scalar("key"): key}
    known |= {Scalar(name): (np.float64(0), np.float64(np.inf)) for name in ("batch", "head")}
    for place, node in enumerate(function.nodes):
        rule = _RULES.get(node.primitive) or (_BOOLS.get(node.primitive) if node.dtype == "bool" else None)
        found = _ANY
        if rule is not None and not node.shape and node.dtype in ("bool", "int32"):
            with np.errstate(invalid="ignore", over="ignore"):
                found = _checked(rule(*(_bounds(operand, known) for operand in node.operands)), node.dtype)
        known[Result(place)] = found
    low, high = _bounds(function.output, known)
    return high >= 1, low >= 1


def device_tiles(call: Any, inputs: Any, function: ScoreFunction, block_q: int, block_k: int) -> tuple[Any, Any]:
    """The same by looking at every pair, bool `[b?, queries, keys]` in tiles: some head sees some pair, all heads see all."""
    places = places_of(call, inputs)
    by_row = any(numbers is not None and numbers.shape[0] > 1 for numbers in (places.values, places.integers))
    rows = places.batch.shape[0] if by_row or "batch" in function.scalars else 1
    places = places._replace(batch=places.batch[:rows], head=places.head if "head" in function.scalars else places.head[:, :1])
    keys = places.key.shape[1]

    def of_block(query: Any) -> tuple[Any, Any]:
        seen = Mapped(function, places._replace(query=query), "bhqs")(None)
        padding = ((0, 0), (0, 0), (0, 0), (0, -keys % block_k))
        some, every = (
            jnp.pad(seen, padding, constant_values=value).reshape(*seen.shape[:3], -1, block_k) for value in (False, True)
        )
        return jnp.any(some, axis=(1, 2, 4)), jnp.all(every, axis=(1, 2, 4))

    padded = jnp.pad(places.query, ((0, 0), (0, -places.query.shape[1] % block_q)), mode="edge")
    blocks = jnp.moveaxis(padded.reshape(padded.shape[0], -1, block_q), 1, 0)
    some, every = jax.lax.map(of_block, blocks)
    return jnp.moveaxis(some, 0, 1), jnp.moveaxis(every, 0, 1)


def _bounds(ref: Ref, known: Mapping[Ref, Bounds]) -> Bounds:
    if isinstance(ref, Constant):
        value = np.float64(ref.value)
        return value, value
    return known.get(ref, _ANY)


def _checked(found: Bounds, dtype: str) -> Bounds:
    """Bounds that the dtype holds: what would overflow may be anything."""
    low, high = np.broadcast_arrays(*found)
    if dtype == "bool":
        return np.where(np.isnan(low), 0.0, np.clip(low, 0, 1)), np.where(np.isnan(high), 1.0, np.clip(high, 0, 1))
    inside = (low >= -_INT32) & (high < _INT32)
    return np.where(inside, low, -np.inf), np.where(inside, high, np.inf)


def _of_ends(combine: Callable[[Any, Any], Any], a: Bounds, b: Bounds) -> Bounds:
    ends = [combine(x, y) for x in a for y in b]
    return np.minimum.reduce(np.broadcast_arrays(*ends)), np.maximum.reduce(np.broadcast_arrays(*ends))


def _divided(a: Bounds, b: Bounds) -> Bounds:
    if np.any((b[0] <= 0) & (b[1] >= 0)):
        return _ANY
    return _of_ends(lambda x, y: np.trunc(x / y), a, b)


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """With the sign of the dividend; of a constant above 0."""
    if np.any(b[0] != b[1]) or np.any(b[0] <= 0):
        return _ANY
    size = b[0]
    same = (np.trunc(a[0] / size) == np.trunc(a[1] / size)) & ((a[0] >= 0) | (a[1] <= 0))
    low, high = np.fmod(a[0], size), np.fmod(a[1], size)
    return np.where(same, low, np.where(a[0] >= 0, 0, 1 - size)), np.where(same, high, np.where(a[1] <= 0, 0, size - 1))


def _absolute(a: Bounds) -> Bounds:
    across = (a[0] <= 0) & (a[1] >= 0)
    low, high = np.abs(a[0]), np.abs(a[1])
    return np.where(across, 0, np.minimum(low, high)), np.maximum(low, high)


def _equal(a: Bounds, b: Bounds) -> Bounds:
    apart = (a[1] < b[0]) | (b[1] < a[0])
    same = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return same * 1.0, ~apart * 1.0


def _not(a: Bounds) -> Bounds:
    return 1 - a[1], 1 - a[0]


def _unequal(a: Bounds, b: Bounds) -> Bounds:
    return _not(_equal(a, b))


def _below(strictly: bool, a: Bounds, b: Bounds) -> Bounds:
    if strictly:
        return (a[1] < b[0]) * 1.0, (a[0] < b[1]) * 1.0
    return (a[1] <= b[0]) * 1.0, (a[0] <= b[1]) * 1.0


def _selected(which: Bounds, *cases: Bounds) -> Bounds:
    if len(cases) != 2:
        return _ANY
    first, second = which[1] < 1, which[0] >= 1
    low = np.where(first, cases[0][0], np.where(second, cases[1][0], np.minimum(cases[0][0], cases[1][0])))
    high = np.where(first, cases[0][1], np.where(second, cases[1][1], np.maximum(cases[0][1], cases[1][1])))
    return low, high


def _both(a: Bounds, b: Bounds) -> Bounds:
    return np.minimum(a[0], b[0]), np.minimum(a[1], b[1])


def _either(a: Bounds, b: Bounds) -> Bounds:
    return np.maximum(a[0], b[0]), np.maximum(a[1], b[1])


_BOOLS: Mapping[str, Callable[..., Bounds]] = {"and": _both, "or": _either, "xor": _unequal, "not": _not}
"""Rules of bools alone: of integers these are of bits."""

_RULES: Mapping[str, Callable[..., Bounds]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": lambda a, b: _of_ends(np.multiply, a, b),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "sign": lambda a: (np.sign(a[0]), np.sign(a[1])),
    "div": _divided,
    "rem": _remainder,
    "max": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "min": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "clamp": lambda low, a, high: tuple(np.minimum(np.maximum(end, low[i]), high[i]) for i, end in enumerate(a)),
    "lt": lambda a, b: _below(True, a, b),
    "le": lambda a, b: _below(False, a, b),
    "gt": lambda a, b: _below(True, b, a),
    "ge": lambda a, b: _below(False, b, a),
    "eq": _equal,
    "ne": _unequal,
    "select_n": _selected,
    "stop_gradient": lambda a: a,
    "copy": lambda a: a,
    "squeeze": lambda a: a,
    "reshape": lambda a: a,
    "broadcast_in_dim": lambda a: a,
}
