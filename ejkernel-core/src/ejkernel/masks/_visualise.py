"""A mask as text, for people."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejkernel._notebook import picture, table
from ejkernel.errors import invalid
from ejkernel.masks import _checks
from ejkernel.masks._parts import Parts

_SQUARES, _DRAWN = 24, 2**22
"""Of a picture: squares on a side, and the most pairs that are looked at for it."""


def visualise(
    info: Parts,
    query_length: int | None,
    key_length: int | None,
    *,
    batch: int,
    head: int,
    max_rows: int,
    max_cols: int,
    compact: bool,
) -> str:
    mask = info.materialize(query_length, key_length)
    if not _checks.is_concrete(mask):
        raise invalid("mask", "a traced value", "known values", remedy="call visualize outside jit")
    for name, index, size in (("batch", batch, mask.shape[0]), ("head", head, mask.shape[1])):
        if not (size == 1 or 0 <= index < size):
            raise invalid(name, index, f"a value in [0, {size - 1}]")
    host = np.asarray(mask[min(batch, mask.shape[0] - 1), min(head, mask.shape[1] - 1)])
    if host.size == 0:
        return f"{host.shape[0]} queries x {host.shape[1]} keys, empty"
    return _blocks(host, max_rows, max_cols) if compact else _matrix(host, max_rows, max_cols)


def _matrix(mask: np.ndarray, max_rows: int, max_cols: int) -> str:
    rows, cols = _sample(mask.shape[0], max_rows), _sample(mask.shape[1], max_cols)
    width = len(str(cols[-1]))
    margin = len(str(rows[-1]))
    sampled = "" if len(rows) == mask.shape[0] and len(cols) == mask.shape[1] else ", sampled"
    lines = [f"{mask.shape[0]} queries x {mask.shape[1]} keys, {mask.mean():.1%} visible{sampled}"]
    lines.append(" " * margin + " | " + " ".join(f"{col:>{width}}" for col in cols))
    lines += [f"{row:>{margin}} | " + " ".join(f"{int(mask[row, col]):>{width}}" for col in cols) for row in rows]
    return "\n".join(lines)


def _blocks(mask: np.ndarray, max_rows: int, max_cols: int) -> str:
    rows, cols = _blocks_of(mask.shape, max_rows, max_cols)
    return "\n".join("".join(_cell(mask[np.ix_(row, col)]) for col in cols) for row in rows)


def _blocks_of(shape: tuple[int, ...], max_rows: int, max_cols: int) -> list[list[np.ndarray]]:
    """Rows and columns in at most so many runs."""
    most = zip(shape, (max_rows, max_cols), strict=True)
    return [np.array_split(np.arange(size), min(size, limit)) for size, limit in most]


def _cell(block: np.ndarray) -> str:
    return "#" if block.all() else "+" if block.any() else "."


def _sample(size: int, most: int) -> list[int]:
    """At most `most` indices, evenly spread, first and last included."""
    return list(range(size)) if size <= most else sorted({round(i * (size - 1) / max(most - 1, 1)) for i in range(most)})


def summary(info: Parts) -> str:
    """The parts that were said: arrays by dtype and shape, structure by value."""
    return f"MaskInfo({', '.join(f'{name}={value}' for name, value in _said(info))})"


def as_html(info: Parts) -> str:
    """The parts as a table, and the first example's first head as a picture where it is known and not too large."""
    parts = table("MaskInfo", ("part", "value"), _said(info))
    return f'<div style="display:flex;gap:1em;align-items:flex-start">{_picture(info)}{parts}</div>'


def _said(info: Parts) -> list[tuple[str, str]]:
    unsaid = {
        "causal": False,
        "causal_offset": 0,
        "window": None,
        "chunk_size": None,
        "prefix": None,
        "sizes": (None, None, None),
    }
    structure = ((name, getattr(info, name)) for name in unsaid)
    return [
        *((name, _short(value)) for name in vars(info) if hasattr(value := getattr(info, name), "shape")),
        *((name, str(value)) for name, value in structure if value != unsaid[name]),
    ]


def _picture(info: Parts) -> str:
    known = all(_checks.is_here(array) for array in jax.tree.leaves(info))
    if not known or info.q_len is None or info.kv_len is None or not 0 < info.q_len * info.kv_len <= _DRAWN:
        return ""
    with jax.ensure_compile_time_eval():  # it may be shown while something else is traced
        mask = np.asarray(info.materialize()[0, 0])
    rows, cols = _blocks_of(mask.shape, _SQUARES, _SQUARES)
    return picture([[float(mask[np.ix_(row, col)].mean()) for col in cols] for row in rows], summary(info))


def _short(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
