"""Values as text that tells any two of them apart, for the keys of what is kept on disk."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Spelled:
    """A value of a call that its text alone says, such as a traced function: equal texts are equal values.

    Attributes:
        text: one line.
    """

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spelled) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


def spelled(value: Any) -> str:
    """Everything that a value says, the same in every process: unlike `repr`, also long arrays, every field of a dataclass, and
    types.

    Args:
        value: plain values, NumPy's scalars, arrays and dtypes, types of modules, members of enumerations; dataclasses, tuples,
            lists and mappings of such.

    Raises:
        TypeError: something else is in it, such as a function, of which only the address could be told.
    """
    kind = cast("type[Any]", type(value))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if isinstance(value, np.dtype):
        return repr(value)
    if isinstance(value, type) and "<locals>" not in value.__qualname__:
        return f"type {value.__module__}.{value.__qualname__}"
    if isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
        content = hashlib.sha256(value.tobytes()).hexdigest()
        return f"{name} {spelled(value.dtype)}{value.shape} {content}"
    if isinstance(value, Spelled) and " at 0x" not in value.text:
        return f"{name} {value.text!r}"
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Spelled)):
        fields = (f"{field.name}={spelled(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{name}({', '.join(fields)})"
    if isinstance(value, (tuple, list)):
        return f"{name}({', '.join(map(spelled, cast('tuple[Any, ...]', value)))})"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return f"{name}({', '.join(f'{spelled(key)}: {spelled(item)}' for key, item in pairs)})"
    raise TypeError(f"value: got {name}, expected plain values, arrays, and dataclasses and tuples of them")
