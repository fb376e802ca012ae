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
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse", "partial", "partial_stats")),
        *((name, ctypes.c_int64) for name in ("batch", "queries", "keys", "heads", "key_heads", "size", "value_size")),
        *((name, ctypes.c_int64) for name in ("below", "above", "pack", "split_kv_ctas")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("ping_pong", ctypes.c_bool),
        ("persistent", ctypes.c_bool),
    )


class MaskParams(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("queries", "keys", "below", "above"))


class Range(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("low", "high"))


class TileScheduler(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("blocks", "heads", "batch", "l2_group")),
        ("reverse_blocks", ctypes.c_bool),
    )


class StreamK(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("first", "waves", "blocks", "low", "tiles", "ctas", "per_cta", "extra"))


class Segment(ctypes.Structure):
    _fields_ = (("block", ctypes.c_int), ("tiles", Range))


class TileCoord(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("row", "block"))


class Band(NamedTuple):
    """Query i sees keys i - below ... i + above."""

    below: int
    above: int


@functools.cache
def library() -> ctypes.CDLL:
    loaded = compiled("attention_on_host.cc", "-O2")
    loaded.attention_tiles.restype = Range
    loaded.attention_coord.restype = TileCoord
    loaded.attention_fully_visible.restype = Range
    loaded.attention_l2_group.restype = ctypes.c_int64
    loaded.attention_stream_k.restype = StreamK
    loaded.attention_segment.restype = Segment
    return loaded


def forward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    band: Band,
    *,
    scale: float,
    cap: float = 0.0,
    ping_pong: bool,
    persistent: bool,
    pack: int = 1,
    split_kv_ctas: int = 0,
    sms: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp of arrays `[batch, length, heads, size]`."""
    (batch, queries, heads, size), keys, value_size = query.shape, key.shape[1], value.shape[3]
    given = [Guarded(array) for array in (query, key, value)]
    out, lse = output((batch, queries, heads, value_size), query.dtype), output((batch, queries, heads), np.float32)
    widest = max(size, value_size)
    partial = (split_kv_ctas, 2, 192, 64) if widest <= 64 else (split_kv_ctas, 2, 128, 128 if widest <= 128 else 256)
    partials = output(partial, np.float32), output((*partial[:3], 2), np.float32)
    pointers = [array.array.ctypes.data for array in (*given, out, lse, *partials)]
    numbers: tuple[Any, ...] = (batch, queries, keys, heads, key.shape[2], size, value_size, *band, pack, split_kv_ctas)
    call = Call(*pointers, *numbers, scale, cap, ping_pong, persistent)
    library().attention_forward(KINDS[query.dtype.name], ctypes.c_int64(sms), call)
    for each in partials:
        each.checked()
    return out.checked(), lse.checked()
