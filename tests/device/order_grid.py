"""What `orders.py` times: a `Problem` is one public call, a `Grid` makes problems of parameters, given or drawn at random.

Arrays are named as parameters of the public function, so that a record of their shapes and of the options is all that
`ejkernel.explain` needs.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel

BOTH = ("forward", "backward")
EARLY = ("forward", "both")
"""Of losses whose forward may form the gradients: "both" is forward and backward together, decided by the forward's choice."""
SAMPLED = 4
"""After so many parameters of a grid comes a drawn one."""
Draw = Callable[[Any], Any]
"""From a key to an array."""


class Problem(NamedTuple):
    """One public call.

    Attributes:
        function: a public one.
        name: unlike that of any other of the function.
        make: its arrays by the name of the parameter; it can be compiled.
        options: its other arguments.
        phases: "forward", "backward", "both".
        kind: of shapes, under which records are summed up.
        moving: arrays to differentiate; none named = all that hold floats.
        without: implementations that are not timed, as they are known to be far behind.
    """

    function: str
    name: str
    make: Callable[[], dict[str, Any]]
    options: Mapping[str, Any] = MappingProxyType({})
    phases: tuple[str, ...] = BOTH
    kind: str = ""
    moving: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes."""
        return jax.eval_shape(self.make)

    @property
    def differentiated(self) -> tuple[str, ...]:
        floats = (name for name, one in self.arrays.items() if one.dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
        return self.moving or tuple(floats)

    def decision(self, phase: str) -> Any:
        """The dispatcher's, for the current target."""
        return decision(self.function, self.arrays, self.options, phase)

    def row(self, phase: str) -> dict[str, Any]:
        """What a record says of it."""
        arrays = {name: f"{one.dtype}[{','.join(map(str, one.shape))}]" for name, one in self.arrays.items()}
        words = {"function": self.function, "problem": self.name, "kind": self.kind, "phase": phase}
        return {**words, "arrays": arrays, "options": dict(self.options)}


def decision(function: str, arrays: dict[str, Any], options: Mapping[str, Any], phase: str) -> Any:
    return getattr(ejkernel.explain(function, **arrays, **options), "backward" if phase == "backward" else "forward")


class Grid(NamedTuple):
    """problem: of parameters; first: those to begin with; draw: others, by a generator; small: for a CPU."""

    problem: Callable[..., Problem]
    first: tuple[tuple[Any, ...], ...]
    draw: Callable[[random.Random], tuple[Any, ...]]
    small: tuple[Any, ...]

    def problems(self, generator: random.Random, more: int) -> Iterator[Problem]:
        """`more` that are drawn, one after every few of the first."""
        first, drawn = list(self.first), [self.draw(generator) for _ in range(more)]
        while first or drawn:
            yield from (self.problem(*given) for given in first[:SAMPLED])
            yield from (self.problem(*given) for given in drawn[: 1 if first else None])
            drawn = drawn[1:] if first else []
            first = first[SAMPLED:]


def between(generator: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """A multiple, its logarithm evenly."""
    return max(round(low * (high / low) ** generator.random() / multiple), 1) * multiple


def normal(*shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> Draw:
    return lambda key: (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def wide(*shape: int) -> Draw:
    return normal(*shape, dtype=jnp.float32)


def below(limit: int, *shape: int) -> Draw:
    return lambda key: jax.random.randint(key, shape, 0, limit, jnp.int32)


def constant(value: Any) -> Draw:
    return lambda _: jnp.asarray(value)


def drawn(**draws: Draw) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), len(draws))
        return {name: draw(key) for key, (name, draw) in zip(keys, draws.items(), strict=True)}

    return make


def bounds(tokens: int, documents: int) -> Draw:
    """Of packed sequences, the last twice as long as the first."""
    parts = np.cumsum(np.linspace(1.0, 2.0, documents))
    return constant(np.concatenate([[0], np.round(tokens * parts / parts[-1])]).astype(np.int32))
