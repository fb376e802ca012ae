"""Calls of the library's handlers, answered on this host: by the handlers' own checks, then by the kernels (`host_kernels`).

Covers the handlers whose launches follow from shapes alone; the knobs of those over rows have tests of their own.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import host_attention
import jax
import ml_dtypes
import numpy as np
from host_kernels import (
    KINDS,
    PACK,
    SCALAR_TYPES,
    Angles,
    Block,
    Guarded,
    Heads,
    Normalised,
    Pages,
    PageWrite,
    Parameter,
    Prefill,
    Problem,
    Requests,
    Results,
    Rotated,
    Side,
    library,
)

from ejkernel_cuda import _library

_STORED = {"float32": 0, "bfloat16": 1, "int8": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
_real = jax.ffi.ffi_call


def check_target(name: str) -> str:
    """The checks of a handler, on the CPU: they need no stream."""
    symbol = f"ejkernel_cuda_{name}_check"
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(_library.load(), symbol)), platform="cpu")
    return symbol


def answered(name: str, specs: Any, *, input_output_aliases: dict[int, int] | None = None) -> Any:
    """What stands for `jax.ffi.ffi_call`, `name` being the handler's without its prefix."""

    def call(*arrays: Any, **attributes: Any) -> list[Any]:
        jax.block_until_ready(_real(check_target(name), specs)(*arrays, **attributes))
        given = [np.asarray(array) for array in arrays]
        results = [Guarded(np.zeros(spec.shape, spec.dtype), output=True) for spec in specs]
        for source, result in (input_output_aliases or {}).items():
            results[result].array[...] = given[source]
        _ANSWERS[name](given, results, **attributes)
        return [jax.numpy.asarray(result.checked()) for result in results]

    return call


def _lanes(half: int, pairs: int) -> int:
    return next(lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes == 32 or lanes * pairs >= half)


def _heads(x: np.ndarray, rotary_dim: int, heads_first: bool) -> Heads:
    batch, length, count, width = (x.shape[axis] for axis in ((0, 2, 1, 3) if heads_first else (0, 1, 2, 3)))
    return Heads(batch, length, count, length if heads_first else 1, width, rotary_dim // 2, heads_first)


def _geometry(x: np.ndarray, rotary_dim: int, interleaved: bool, pairs: int = 4) -> tuple[bool, int]:
    """Whether packs are used, and the lanes of a head, of which each takes so many pairs from halves in packs."""
    pack, rotated = PACK[x.dtype.name], rotary_dim if interleaved else rotary_dim // 2
    packed = x.shape[3] % pack == 0 and rotated % pack == 0
    return packed, _lanes(rotary_dim // 2, (pack // 2 if interleaved else pairs) if packed else 1)


def _rotate(given, results, *, rotary_dim, interleaved, heads_first, inverse, span, threads):
    cos, sin = (Guarded(value) for value in given[2:])
    angles = Angles(cos.pointer, sin.pointer, len(cos.array) == 1, len(sin.array) == 1, cos.array.shape[2] != rotary_dim)
    packed, lanes = _geometry(given[0], int(rotary_dim), interleaved, PACK[given[0].dtype.name])
    inputs = [Guarded(x) for x in given[:2]]
    sides = [
        Rotated(x.pointer, out.pointer, _heads(x.array, int(rotary_dim), heads_first))
        for x, out in zip(inputs, results, strict=True)
    ]
    library("heads").rope_rotate(
        KINDS[given[0].dtype.name], ctypes.c_bool(interleaved), ctypes.c_bool(packed), lanes, int(threads), *sides, angles,
        int(span), ctypes.c_bool(inverse),
    )  # fmt: skip


def _angle_gradients(given, results, *, rotary_dim, interleaved, heads_first):
    d_cos, d_sin = results
    for index, (x, grad) in enumerate(zip(given[:2], given[2:], strict=True)):
        if not x.size:
            continue
        packed, lanes = _geometry(x, int(rotary_dim), interleaved)
        library("heads").rope_angle_gradients(
            KINDS[x.dtype.name], ctypes.c_bool(interleaved), ctypes.c_bool(packed), lanes, Guarded(x).pointer,
            Guarded(grad).pointer, d_cos.pointer, d_sin.pointer, _heads(x, int(rotary_dim), heads_first),
            ctypes.c_bool(len(d_cos.array) == 1), ctypes.c_bool(d_cos.array.shape[2] != rotary_dim), ctypes.c_bool(index > 0),
        )  # fmt: skip


def _whole_head(x: np.ndarray, rotary_dim: int, interleaved: bool) -> tuple[bool, int]:
    """As `_geometry`, for threads that hold all channels of a head."""
    pack, rest = PACK[x.dtype.name], x.shape[3] - rotary_dim
    packed = _geometry(x, rotary_dim, interleaved)[0] and (interleaved or rest // 2 % pack == 0)
    return packed, _lanes(x.shape[3] // 2, 4)


def _scale_parameter(scale: Guarded) -> Parameter:
    members, width = scale.array.shape
    return Parameter(scale.pointer if members else None, width if members > 1 else 0)


def _norm_rotate(given, results, *, rotary_dim, interleaved, heads_first, epsilon, scale_offset, span, threads):
    cos, sin, *scales = (Guarded(value) for value in given[2:])
    angles = Angles(cos.pointer, sin.pointer, len(cos.array) == 1, len(sin.array) == 1, cos.array.shape[2] != rotary_dim)
    packed, lanes = _whole_head(given[0], int(rotary_dim), interleaved)
    inputs = [Guarded(x) for x in given[:2]]
    sides = [
        Normalised(
            x.pointer, _scale_parameter(scale), out.pointer, rstd.pointer if rstd.array.size else None,
            _heads(x.array, int(rotary_dim), heads_first),
        )
        for x, scale, out, rstd in zip(inputs, scales, results[:2], results[2:], strict=True)
    ]  # fmt: skip
    library("heads").qk_norm_rope_forward(
        KINDS[given[0].dtype.name], ctypes.c_bool(interleaved), ctypes.c_bool(packed), lanes, int(threads), *sides, angles,
        int(span), ctypes.c_float(epsilon), ctypes.c_float(scale_offset),
    )  # fmt: skip


def _norm_rotate_back(given, results, *, rotary_dim, interleaved, heads_first, scale_offset, span, partials):
    cos, sin, *scales = (Guarded(value) for value in given[6:])
    angles = Angles(cos.pointer, sin.pointer, len(cos.array) == 1, len(sin.array) == 1, cos.array.shape[2] != rotary_dim)
    sides = zip(given[:2], given[2:4], given[4:6], scales, results[:2], results[2:4], results[4:], strict=True)
    for x, rstd, grad, scale, d_x, total, partial in sides:
        packed, lanes = _whole_head(x, int(rotary_dim), interleaved)
        members = len(scale.array)
        library("heads").qk_norm_rope_backward(
            KINDS[x.dtype.name], ctypes.c_bool(interleaved), ctypes.c_bool(packed), lanes, Guarded(x).pointer,
            Guarded(rstd).pointer, Guarded(grad).pointer, _scale_parameter(scale), d_x.pointer,
            partial.pointer if members else None, total.pointer if members else None, SCALAR_TYPES[total.array.dtype.name], angles,
            _heads(x, int(rotary_dim), heads_first), int(span), ctypes.c_int64(max(1, members)), ctypes.c_int64(int(partials)),
            ctypes.c_float(scale_offset),
        )  # fmt: skip


def _normalised_angle_gradients(given, results, *, rotary_dim, interleaved, heads_first, scale_offset):
    d_cos, d_sin = results
    sides = zip(given[:2], given[2:4], given[4:6], given[6:], strict=True)
    for index, (x, rstd, grad, scale) in enumerate(sides):
        if not x.size:
            continue
        packed, lanes = _geometry(x, int(rotary_dim), interleaved)
        guarded = Guarded(scale)
        library("heads").qk_norm_rope_angle_gradients(
            KINDS[x.dtype.name], ctypes.c_bool(interleaved), ctypes.c_bool(packed), lanes, Guarded(x).pointer,
            Guarded(rstd).pointer, Guarded(grad).pointer, _scale_parameter(guarded), d_cos.pointer, d_sin.pointer,
            _heads(x, int(rotary_dim), heads_first), ctypes.c_bool(len(d_cos.array) == 1),
            ctypes.c_bool(d_cos.array.shape[2] != rotary_dim), ctypes.c_bool(index > 0), ctypes.c_float(scale_offset),
        )  # fmt: skip


def _update_block(packs, threads, tokens):
    wide = min(threads, _power(packs))
    high = min(threads // wide, _power(tokens))
    return max(wide, 32 // high), high


def _power(value):
    """The least power of two that is as large."""
    return 1 << max(0, value - 1).bit_length()


def _update(
    given, results, *, key_strides, value_strides, first_value, pages, page_size, fused, threads, tokens
):  # fmt: skip
    key, value, starts, lengths, tables, *scales = (Guarded(array) for array in given[:7])
    batch, length = key.array.shape[:2]
    requests = Requests(
        starts.pointer, lengths.pointer, tables.pointer, *(len(x.array) == 1 for x in (starts, lengths, tables)), length,
        lengths.array.shape[1], tables.array.shape[2], pages, page_size,
    )  # fmt: skip
    stored = results[0].array.dtype
    begin = (results[0].array if fused else results[1].array).ctypes.data + int(first_value) * stored.itemsize
    sides = (key, scales[0], results[0].array.ctypes.data, key_strides), (value, scales[1], begin, value_strides)
    for new, scale, to, strides in sides:
        pack = 16 // new.array.dtype.itemsize
        access = min(16, pack * stored.itemsize)
        packed = new.array.shape[3] % pack == 0 and to % access == 0 and all(s * stored.itemsize % access == 0 for s in strides)
        factors, scaled = scale.array.shape, scale.array.size > 0
        write = PageWrite(
            new.pointer, to, scale.pointer if scaled else None, *map(int, strides), factors[1] if factors[0] > 1 else 0,
            int(factors[1] > 1), *new.array.shape[2:],
        )  # fmt: skip
        copied = new.array.dtype == stored and stored == ml_dtypes.bfloat16 and not scaled
        kind = 5 if copied else _STORED[stored.name]
        block = _update_block(math.prod(new.array.shape[2:]) // (pack if packed else 1), int(threads), int(tokens))
        library("paged_cache_update").update_pages(
            KINDS[new.array.dtype.name], kind, ctypes.c_bool(packed), Block(batch * length, *block, int(tokens)), requests, write,
            PageWrite(),
        )  # fmt: skip
    assert math.prod(key.array.shape) > 0


_BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")


def _side(pages: Guarded, strides: Any, first: int, size: int) -> Side:
    itemsize = pages.array.dtype.itemsize
    steps, data = [int(step) * itemsize for step in strides], pages.array.ctypes.data + int(first) * itemsize
    return Side(data, *steps, size, not any(value % 16 for value in (data, size * itemsize, *steps)))


def _batch_stride(factors: Guarded) -> int:
    return factors.array.shape[1] if factors.array.shape[0] > 1 else 0


def _attend_pages(
    given, results, *, key_strides, value_strides, first_value, key_heads, key_size, pages, page_size, fused, causal, window,
    scale, soft_cap, stages, tile_key_heads, tma,
):  # fmt: skip
    query, key_pages, value_pages, starts, lengths, tables, *factors = (Guarded(array) for array in given)
    out, lse, partial, partial_stats, splits = results
    batch, tokens, heads, query_size = query.array.shape
    size = int(key_size)
    if not query.array.size:
        return
    requests = Requests(
        starts.pointer, lengths.pointer, tables.pointer, *(len(x.array) == 1 for x in (starts, lengths, tables)), tokens,
        lengths.array.shape[1], tables.array.shape[2], pages, page_size,
    )  # fmt: skip
    value_size, group = out.array.shape[3], heads // int(key_heads)
    values = key_pages if fused else value_pages
    problem = Problem(
        requests, query.pointer, _side(key_pages, key_strides, 0, size), _side(values, value_strides, first_value, value_size),
        *(x.pointer if x.array.size else None for x in factors), _batch_stride(factors[0]),
        *(stride for x in factors[1:] for stride in (_batch_stride(x), int(x.array.shape[1] > 1))),
        batch, heads, query_size, group, -(-group // 16), int(key_heads) // int(tile_key_heads), int(tile_key_heads), int(window),
        float(scale), float(soft_cap), bool(causal), query.array.dtype == ml_dtypes.bfloat16,
        (32 if key_pages.array.dtype.itemsize == 1 and max(size, value_size) <= 128 else 16).bit_length() - 1,
    )  # fmt: skip
    answers = Results(
        out.pointer, lse.pointer if lse.array.size else None, partial.pointer, partial_stats.pointer, splits.pointer
    )
    stored = key_pages.array.dtype.name
    width = next(index for index, room in enumerate((64, 128, 256)) if max(size, value_size) <= room)
    kind = _BYTES.index(stored) + 1 if stored in _BYTES else 0
    library("paged_attention").paged_attention_forward(
        kind, width, ctypes.byref(problem), ctypes.byref(answers), partial.array.shape[0], int(stages), ctypes.c_bool(tma)
    )


def _pages(pages: Guarded, strides: Any, first: int, size: int) -> Pages:
    return Pages(pages.array.ctypes.data + 2 * int(first), *map(int, strides), size)


def _prefill(
    given, results, *, key_strides, value_strides, first_value, key_heads, key_size, value_size, pages, page_size, fused, causal,
    window, scale, cap, pack,
):  # fmt: skip
    query, key_pages, value_pages, starts, lengths, tables, sinks = (Guarded(array) for array in given)
    out, lse = results
    batch, tokens, heads, size = query.array.shape
    requests = Requests(
        starts.pointer, lengths.pointer, tables.pointer, *(len(x.array) == 1 for x in (starts, lengths, tables)), tokens,
        lengths.array.shape[1], tables.array.shape[2], pages, page_size,
    )  # fmt: skip
    call = Prefill(
        requests, _pages(key_pages, key_strides, 0, int(key_size)),
        _pages(key_pages if fused else value_pages, value_strides, first_value, int(value_size)), query.pointer, out.pointer,
        *(x.pointer if x.array.size else None for x in (lse, sinks)), _batch_stride(sinks), batch, heads, key_heads, size,
        out.array.shape[3], window, pack, scale, cap, bool(causal), batch > 1 and key_strides[3] > 0,
    )  # fmt: skip
    kind = host_attention.KINDS[query.array.dtype.name]
    library("paged_prefill").paged_prefill_forward(kind, ctypes.byref(call))


def _attend(given, results, *, below, above, scale, cap, pack, ping_pong, persistent):
    out, lse = host_attention.forward(
        *given, host_attention.Band(int(below), int(above)), scale=float(scale), cap=float(cap),
        pack=int(pack), split_kv_ctas=results[2].array.shape[0], ping_pong=bool(ping_pong), persistent=bool(persistent),
    )  # fmt: skip
    results[0].array[...] = out
    if results[1].array.size:
        results[1].array[...] = lse


_ANSWERS = {
    "flash_attention_forward": _attend,
    "paged_attention_forward": _attend_pages,
    "paged_prefill_forward": _prefill,
    "rope_rotate": _rotate,
    "rope_angle_gradients": _angle_gradients,
    "qk_norm_rope_forward": _norm_rotate,
    "qk_norm_rope_backward": _norm_rotate_back,
    "qk_norm_rope_angle_gradients": _normalised_angle_gradients,
    "paged_cache_update_forward": _update,
}
