"""Named problems, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One named problem of an operation.

    Attributes:
        name: unique within the operation, e.g. `"gqa-causal-tail"`.
        arrays: makes the array arguments of the operation's `canonicalise` from a random generator; NumPy, floats in float32.
        options: its other arguments.
        tags: `"bench"` for problems of the size of an accelerator's benchmark, `"bench-cpu"` for a CPU's, `"bench-float8"` for
            an accelerator's with operands in float8, `"extreme"` for those beyond low-precision dtypes, `"wide-range"` for those
            beyond float16 only, `"nan"` for those in which the reference has NaN: an output is NaN exactly there, a gradient is
            compared elsewhere; `"kink"` for those where the reference has no derivative; `"sums"` for those with gradients that are
            sums over time of what cancels. And so on.
    """

    name: str
    arrays: Callable[[np.random.Generator], Mapping[str, Any]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tags: frozenset[str] = frozenset()

    @property
    def is_benchmark(self) -> bool:
        """Whether it is too large for tests."""
        return not self.tags.isdisjoint({"bench", "bench-cpu", "bench-float8"})

    def fits(self, dtype: str) -> bool:
        """Whether its values mean the same in this dtype."""
        if "extreme" in self.tags:
            return dtype in ("float32", "float64")
        return "wide-range" not in self.tags or dtype != "float16"


@dataclasses.dataclass(frozen=True)
class Toggle:
    """How to show that an implementation consumes one field of the call.

    The case is run as it is and once more with the change; results (or, with `program=True`, at least the lowered programs)
    must differ, or the implementation must refuse one of the two.

    Attributes:
        case: name of the case to start from.
        options: options to change.
        drop: array argument to leave out.
        change: makes other arrays of those that are left, where they do not belong together any more.
        program: the field changes how the result is computed rather than the exact result (e.g. `precision`).
        dtype: the only one in which the field says anything; None = any. Products of halves have the same bits at any `precision`.
    """

    case: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drop: str | None = None
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    program: bool = False
    dtype: str | None = None
