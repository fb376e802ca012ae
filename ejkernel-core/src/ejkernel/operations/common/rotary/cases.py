"""Arrays of the named problems of the operations that rotate queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def rotary_arrays(
    batch: int, length: int, heads: int, width: int, *, keys: int = 0, angles: tuple[int, ...], heads_first: bool = False
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`angles` is the shape of cos and sin, which are independent random numbers, so that no channel stands for another."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def heads_of(count: int) -> Any:
            shape = (batch, count, length, width) if heads_first else (batch, length, count, width)
            return rng.standard_normal(shape).astype(np.float32)

        arrays = {"query": heads_of(heads)}
        if keys:
            arrays["key"] = heads_of(keys)
        return {**arrays, **{name: rng.uniform(-1, 1, angles).astype(np.float32) for name in ("cos", "sin")}}

    return make
