"""The attention kernel compiled for this host, where fibers stand for threads, called with NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
from host_kernels import Guarded, compiled, output

KINDS = {"float16": 0, "bfloat16": 1}


class Call(ctypes.Structure):
    """As in csrc/flash_attention/launch.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse", "part", "part_weight")),
        *((name, ctypes.c_int64) for name in ("batch", "queries", "keys", "heads", "key_heads", "size", "value_size")),
        *((name, ctypes.c_int64) for name in ("below", "above", "pack", "sharers")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("take_turns", ctypes.c_bool),
        ("persistent", ctypes.c_bool),
    )


class Rules(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("queries", "keys", "below", "above"))


class Range(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("low", "high"))


class Order(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("blocks", "heads", "batch", "section")),
        ("last_first", ctypes.c_bool),
    )


class Shares(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("first", "rounds", "blocks", "low", "tiles", "programs", "each", "longer")
    )


class Piece(ctypes.Structure):
    _fields_ = (("block", ctypes.c_int), ("tiles", Range))


class Place(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("row", "block"))


class Band(NamedTuple):
    """Query i sees keys i - below ... i + above."""

    below: int
    above: int


@functools.cache
def library() -> ctypes.CDLL:
    loaded = compiled("attention_on_host.cc", "-O2")
    loaded.attention_tiles.restype = Range
    loaded.attention_place.restype = Place
    loaded.attention_seen_by_all.restype = Range
    loaded.attention_section.restype = ctypes.c_int64
    loaded.attention_shares.restype = Shares
    loaded.attention_piece.restype = Piece
    return loaded


def forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    band: Band,
    *,
    scale: float,
    cap: float = 0.0,
    take_turns: bool,
    persistent: bool,
    pack: int = 1,
    sharers: int = 0,
    processors: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of arrays `[batch, length, heads, size]`."""
    (batch, queries, heads, size), keys, value_size = query.shape, key.shape[1], value.shape[3]
    given = [Guarded(array) for array in (query, key, value)]
    out, lse = output((batch, queries, heads, value_size), query.dtype), output((batch, queries, heads), np.float32)
    widest = max(size, value_size)
    part = (sharers, 2, 192, 64) if widest <= 64 else (sharers, 2, 128, 128 if widest <= 128 else 256)
    parts = output(part, np.float32), output((*part[:3], 2), np.float32)
    pointers = [array.array.ctypes.data for array in (*given, out, lse, *parts)]
    numbers: tuple[Any, ...] = (batch, queries, keys, heads, key.shape[2], size, value_size, *band, pack, sharers)
    call = Call(*pointers, *numbers, scale, cap, take_turns, persistent)
    library().attention_forward(KINDS[query.dtype.name], ctypes.c_int64(processors), call)
    for each in parts:
        each.checked()
    return out.checked(), lse.checked()
