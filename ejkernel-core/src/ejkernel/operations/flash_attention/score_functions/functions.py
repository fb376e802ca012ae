"""The score and mask functions of one call, with the arrays that they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import invalid
from ejkernel.operations.flash_attention.score_functions.record import SCALARS, Places, ScoreFunction, packed
from ejkernel.operations.flash_attention.score_functions.tracing import Tracing
from ejkernel.utils.dtypes import accumulator


@dataclasses.dataclass(frozen=True)
class Functions:
    """What is done with the scores of a call.

    Attributes:
        score_mod, mask_mod: the functions, or None.
        values, integers: the numbers that they read, `[1, n]`; None where they read none.
    """

    score_mod: ScoreFunction | None = None
    mask_mod: ScoreFunction | None = None
    values: Any = None
    integers: Any = None

    @classmethod
    def of(cls, score_mod: Any, mask_mod: Any, mod_inputs: Any, dtype: Any) -> Functions:
        """Trace Python functions for attention in this dtype."""
        if score_mod is None and mask_mod is None:
            if mod_inputs is not None:
                raise invalid("mod_inputs", "arrays", "None without score_mod and mask_mod")
            return cls()
        tracing = Tracing(accumulator(jnp.dtype(dtype)))
        mod_inputs = jax.tree.map(jnp.asarray, mod_inputs)
        score = None if score_mod is None else tracing.traced("score_mod", score_mod, mod_inputs, masks=False)
        mask = None if mask_mod is None else tracing.traced("mask_mod", mask_mod, mod_inputs, masks=True)
        arrays = tracing.arrays
        return cls(score, mask, packed(arrays, "values", tracing.dtype), packed(arrays, "integers", jnp.int32))

    @classmethod
    def given(cls, score_mod: Any, mask_mod: Any, mod_inputs: Any, values: Any, integers: Any, dtype: Any) -> Functions:
        """The functions of a call, which may be traced already, with the numbers that they read."""
        if isinstance(score_mod or mask_mod, ScoreFunction):
            return cls(score_mod, mask_mod, values, integers)
        return cls.of(score_mod, mask_mod, mod_inputs, dtype)

    def inputs(self, sizes: tuple[int, int, int, int], **given: Any) -> dict[str, Any]:
        """The arrays of the canonical inputs, for (B, H, T, S): what the functions read, and of the indices those that they do."""
        if self.score_mod is None and self.mask_mod is None:
            return {}
        found = {"mod_values": self.values, "mod_integers": self.integers}
        for name, known in indices_of(*sizes[:2]).items():
            index = known if given[name] is None else given[name]
            found[name] = index if name.removesuffix("_index") in self.scalars else None
        for name in ("query_index", "key_index"):
            found[name] = given[name] if name.removesuffix("_index") in self.scalars else None
        return found

    @property
    def scalars(self) -> frozenset[str]:
        """The scalars that any of them reads."""
        functions = (self.score_mod, self.mask_mod)
        return frozenset[str]().union(*(function.scalars for function in functions if function is not None))

    def with_score(self, score_mod: Callable[..., Any], dtype: Any) -> Functions:
        """The same, with a Python function of the score after `score_mod`."""

        def both(score: Any, *indices: Any) -> Any:
            return score_mod(self._call(self.score_mod, (score, *indices)), *indices)

        def mask(*indices: Any) -> Any:
            return self._call(self.mask_mod, (None, *indices))

        return Functions.of(both, None if self.mask_mod is None else mask, None, dtype)

    def _call(self, function: ScoreFunction | None, scalars: tuple[Any, ...]) -> Any:
        if function is None:
            return scalars[0]
        given: dict[str, Any] = dict(zip(SCALARS, scalars, strict=True))
        values, integers = (None if numbers is None else numbers[0] for numbers in (self.values, self.integers))
        return function.computed(given, function.loaded(given, values, integers))


def indices_of(batch: int, heads: int) -> dict[str, Any]:
    """The indices of the rows and heads of a whole problem, for its parts."""
    return {"batch_index": jnp.arange(batch, dtype=jnp.int32), "head_index": jnp.arange(heads, dtype=jnp.int32)[None]}


def places_of(call: Any, inputs: Any) -> Places:
    """Where all scores of a call stand, with heads as one axis."""

    def index(given: Any, size: int) -> Any:
        return jnp.arange(size, dtype=jnp.int32)[None] if given is None else jnp.asarray(given)

    batch, queries, heads = call.query.shape[:3]
    return Places(
        index(inputs.batch_index, batch).reshape(-1),
        index(inputs.head_index, heads),
        index(inputs.query_index, queries),
        index(inputs.key_index, call.key.shape[1]),
        inputs.mod_values,
        inputs.mod_integers,
    )
