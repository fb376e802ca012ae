"""Options that the running program computes, such as the window of each layer of a `jax.lax.scan`: they travel as arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ejkernel.utils.tracing import has_traced, is_traced


def split_traced(options: Mapping[str, Any], names: Collection[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Traced options, of these names or of any, and the others. Of a pair with one traced side, both have their side and None."""
    traced: dict[str, Any] = {}
    static: dict[str, Any] = {}
    for name, value in options.items():
        if (names is not None and name not in names) or not has_traced(value):
            static[name] = value
        elif isinstance(value, (tuple, list)):
            traced[name] = tuple(side if is_traced(side) else None for side in value)
            static[name] = tuple(None if is_traced(side) else side for side in value)
        else:
            traced[name] = value
    return traced, static


def with_traced(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays, among them the traced options, and static options together: the way back from `split_traced`."""
    both = {name: _joined(arrays[name], options[name]) for name in arrays.keys() & options.keys()}
    return {**arrays, **options, **both}


def _joined(traced: Any, static: Any) -> tuple[Any, ...]:
    return tuple(side if other is None else other for side, other in zip(static, traced, strict=True))
