"""The sizes that the parts of a mask tell, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel.errors import invalid
from ejkernel.masks import _checks
from ejkernel.masks._parts import Parts


def last_axis(segments: Any, positions: Any, size: int | None, dense: Any, axis: int) -> int | None:
    """Size of one side: from its own arrays, else as said, else from the dense mask."""
    for array in (segments, positions):
        if array is not None:
            return array.shape[-1]
    return size if size is not None or dense is None else dense.shape[axis]


def both(purpose: str, query_length: int | None, key_length: int | None) -> tuple[int, int]:
    """(T, S), or an error that says how to give them."""
    if query_length is None or key_length is None:
        got = f"T={query_length}, S={key_length}"
        raise invalid(f"sizes for {purpose}", got, "both", remedy="use materialize(T, S) or pass sizes=")
    return query_length, key_length


def check(info: Parts, names: Sequence[str]) -> None:
    """Refuse parts whose sizes contradict each other."""

    def along(name: str, axis: int, broadcasts: bool = False) -> tuple[str, int | None, bool]:
        array = getattr(info, name)
        return name, None if array is None else array.shape[axis], broadcasts

    batch, query, key = info.sizes
    _checks.agree("batch size", [*(along(name, 0, True) for name in names), ("sizes[0]", batch, True)])
    query_sizes = [along("query_segments", 1), along("query_positions", 1), ("sizes[1]", query, False)]
    _checks.agree("number of queries", [*query_sizes, along("dense", 2, True)])
    key_sizes = [along("key_segments", 1), along("key_positions", 1), ("sizes[2]", key, False)]
    _checks.agree("number of keys", [*key_sizes, along("dense", 3, True)])


def not_told_by_arrays(info: Parts, names: Sequence[str]) -> tuple[int | None, int | None, int | None]:
    """`sizes` without those that an array tells: inside `shard_map` the arrays are local and a static size would be stale."""
    batch, query, key = info.sizes
    batches = {array.shape[0] for name in names if (array := getattr(info, name)) is not None}
    queries = [array.shape[-1] for array in (info.query_segments, info.query_positions) if array is not None]
    keys = [array.shape[-1] for array in (info.key_segments, info.key_positions) if array is not None]
    if info.dense is not None:
        queries.append(info.dense.shape[2])
        keys.append(info.dense.shape[3])
    return (
        None if batch in batches else batch,
        None if query in queries else query,
        None if key in keys else key,
    )
