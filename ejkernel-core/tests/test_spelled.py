"""Values spelled as text, which keys of lowered code are made of: different values differently."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import kernel_registry
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.plugin import Target, resolve
from ejkernel.testing.problem import cases_of, representative
from ejkernel.testing.shapes import bound_shapes
from ejkernel.utils.spelled import spelled


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Record:
    shown: Any
    hidden: Any = dataclasses.field(default=0, repr=False, compare=False)


LONG = np.arange(5000.0)
VALUES = (
    *(None, True, 1, 1.0, 0.0, -0.0, "1", b"1", 1e-6, 1.0000000000000002, Colour.RED, "Colour.RED", int, float, jnp.float32),
    *(np.float32(1), np.float64(1), np.int64(1), np.dtype("float32"), np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)),
    *(LONG, np.where(LONG == 2500, 0, LONG), LONG.astype(np.float32), LONG.reshape(50, 100)),
    *((), [], (1,), [1], (1, (2,)), ((1, 2),), {"a": 1}, {"a": 2}, tuple(range(3000)), (*range(2999), 0)),
    *(Record(1), Record(1, 1), Record("1"), Record(LONG), Record(LONG + 1)),
)


def test_spelling_tells_values_apart():
    texts = [spelled(value) for value in VALUES]
    assert len({*texts}) == len(VALUES)
    assert spelled(Record((LONG.copy(), Colour.RED))) == spelled(Record((LONG, Colour.RED)))


@pytest.mark.parametrize("value", [lambda: 0, (1, print), Record(1, object()), np.array([object()])])
def test_what_only_has_an_address_cannot_be_spelled(value):
    with pytest.raises(TypeError, match="expected plain values"):
        spelled(value)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_no_two_calls_of_an_operation_are_spelled_alike(operation):
    """Over all cases, with every implementation's configs for a GPU; calls with functions in them are not spelled."""
    target = Target("gpu", "", "9.0")
    found: dict[str, Any] = {}
    for case in cases_of(operation):
        _, call = bound_shapes(operation, case, "bfloat16")
        try:
            spelled(call)
        except TypeError:
            assert any(callable(getattr(call, field.name)) for field in dataclasses.fields(call))
            continue
        saving = dataclasses.replace(call, save_residuals=not call.save_residuals)
        for value in (call, saving):
            assert found.setdefault(spelled(value), value) == value
        for candidate in kernel_registry.list_implementations(operation) if case in representative(operation)[:1] else ():
            space, supports = map(resolve, (candidate.implementation.configs, candidate.implementation.supports))
            if space is None or (supports is not None and supports(call, target)):
                continue
            configs = [space.heuristic(call, target), *space.search_space(call, target)]
            assert len({spelled(config) for config in configs}) == len({*configs})
    assert len({*found.values()}) == len(found) > 0
