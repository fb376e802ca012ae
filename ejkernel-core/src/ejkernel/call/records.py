"""One invocation as data: the canonical call, its cost, and its arrays with the way back."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The canonical, hashable description of one invocation.

    A subclass has one `ArraySpec | None` field for every field of the operation's `Inputs`, under the same name, and its flags.

    Attributes:
        save_residuals: whether forward must return the residuals that backward reads. Set by core, never by users.
    """

    save_residuals: bool = False

    @property
    def tolerated_as(self) -> str | None:
        """The entry of the tolerances to which results are held, a dtype's or another; None: that of their own dtype."""
        return None


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work of one phase: floating-point operations and the fewest bytes that must move."""

    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Bound:
    """A checked call with its arrays, and the way back from outputs to what the public function returns."""

    call: Any
    inputs: Any
    finish: Callable[[Any], Any]


@functools.lru_cache(maxsize=4096)
def given_fields(call: Call) -> tuple[str, ...]:
    """The optional fields of a call that are not at their defaults; what core sets for itself is none of them."""
    fields = (field for field in dataclasses.fields(call) if field.default is not dataclasses.MISSING)
    return tuple(f.name for f in fields if f.name != "save_residuals" and getattr(call, f.name) != f.default)


def keep_former_names(record: Any, renamed: Iterable[tuple[str, str]]) -> None:
    """Let the fields of a dataclass or NamedTuple be read and given by their former names, too."""
    fields = getattr(record, "_fields", None) or record.__dataclass_fields__
    former = {old: new for old, new in renamed if new in fields and not hasattr(record, old)}
    if not former:
        return

    def by_either(method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(method)(lambda *args, **given: method(*args, **by_present_names(given, former)))

    for old, new in former.items():
        setattr(record, old, property(operator.attrgetter(new)))
    for name in ("__new__", "_replace") if issubclass(record, tuple) else ("__init__",):
        setattr(record, name, by_either(getattr(record, name)))


def by_present_names(given: Mapping[str, Any], renamed: Mapping[str, str]) -> Mapping[str, Any]:
    """Values by the present names of fields; what is under a former name replaces what is beside it."""
    former = {new: given[old] for old, new in renamed.items() if old in given}
    return {**{name: value for name, value in given.items() if name not in renamed}, **former} if former else given
