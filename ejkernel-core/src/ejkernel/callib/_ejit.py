"""`ejit`: `jax.jit` under the name and in the forms that clients use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ejkernel.errors import wrong_type


def ejit(
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    **options: Any,
) -> Any:
    """`jax.jit`, also as a decorator with arguments: `@ejit`, `@ejit(static_argnums=1)`, `ejit(fn, donate_argnums=0)`.

    Nothing is kept on disk by it; JAX's own compilation cache (`jax_compilation_cache_dir`) does that for every program.

    Args:
        fn: the function; None returns a decorator.
        static_argnums, static_argnames: arguments whose values are part of the program.
        donate_argnums, donate_argnames: arguments whose buffers may be reused.
        in_shardings, out_shardings: as in `jax.jit`; None leaves them to JAX.
        **options: the other arguments of `jax.jit`.

    Returns:
        What `jax.jit` returns, with `.lower(...)`, or a decorator.

    Raises:
        TypeError: fn is not callable, or an option is not one of `jax.jit`'s.

    Example:
        >>> @ejit(static_argnames="power")
        ... def raised(x, power):
        ...     return x**power
        >>> float(raised(3.0, power=2))
        9.0
    """
    given = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
    }
    options.update((name, value) for name, value in given.items() if value is not None)
    if fn is None:
        return functools.partial(ejit, **options)
    if not callable(fn):
        raise wrong_type("fn", repr(fn), "a function, with the options of jax.jit as keywords")
    return jax.jit(fn, **options)
