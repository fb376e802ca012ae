"""Who may run a call: `use(...)`, the environment and the `platform=` argument, folded into one hashable policy.

The context is a `jax.make_user_context`, so that a compiled `jit` is traced again under another policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from ejkernel._target import Target, as_target
from ejkernel.errors import invalid, wrong_type

PlatformChoice = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class Policy:
    """The settings in force for one call.

    Attributes:
        platforms: the only ones to try, in this order; empty = automatic.
        forbid: never to be tried.
        custom_gradients: False gives plain JAX code that `jvp` and Hessians can differentiate.
        overlay: config overlays, innermost first: pairs of operation or implementation id and config.
        target: the device to build for, in place of the one that the arrays are on; None finds out.
        source: which setting named the platforms: "argument", "use", "environment" or "default".
    """

    platforms: tuple[str, ...] = ()
    forbid: frozenset[str] = frozenset()
    custom_gradients: bool = True
    overlay: tuple[tuple[str, Any], ...] = ()
    target: Target | None = None
    source: str = "default"


_context = jax.make_user_context(default_value=None)
_epoch = jax.make_user_context(default_value=0)


def bump_epoch(epoch: int) -> None:
    """Make every compiled program that dispatched under an older registry be traced again."""
    _epoch.set_global(epoch)  # pyright: ignore[reportAttributeAccessIssue]


def current() -> Policy:
    """The policy of the innermost `use(...)`, or the default."""
    return _context.value or Policy()  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def use(
    *platforms: str,
    forbid: Iterable[str] = (),
    custom_gradients: bool | None = None,
    overlay: Iterable[tuple[str, Any]] = (),
    target: Target | str | Any | None = None,
) -> Iterator[Policy]:
    """Choose or forbid platforms for every ejkernel call inside the `with` block.

    Blocks nest: inner platforms replace outer ones, forbidden platforms add up.

    Args:
        platforms: the only platforms to try, in this order; none leaves the choice as it was.
        forbid: platforms that must not run.
        custom_gradients: False differentiates the implementation's own JAX code instead of calling backward kernels, which
            is what `jax.jvp`, `jax.hessian` and gradients of gradients need.
        overlay: see `ejkernel.overlay`.
        target: the device to build for when it is not the one that the arrays are on, as when a program is lowered for a GPU
            on a machine without one: a `Target` such as `Target("gpu", "NVIDIA H200", "9.0")`, a `jax.Device`, or a backend's
            name.

    Yields:
        The policy in force.

    Raises:
        ValueError: unknown platform, or one both asked for and forbidden.

    Example:
        >>> import ejkernel
        >>> with ejkernel.use("xla"):
        ...     ejkernel.softmax(jax.numpy.zeros((2, 4))).shape
        (2, 4)
    """
    outer = current()
    names = _as_names("use", platforms)
    forbidden = outer.forbid | frozenset(_as_names("forbid", forbid))
    policy = dataclasses.replace(
        outer,
        platforms=names or outer.platforms,
        forbid=forbidden,
        custom_gradients=outer.custom_gradients if custom_gradients is None else custom_gradients,
        overlay=(*overlay, *outer.overlay),
        target=outer.target if target is None else as_target(target),
        source="use" if names else outer.source,
    )
    _refuse_contradiction(policy)
    with _context(policy):
        yield policy


def for_call(operation: str, platform: PlatformChoice) -> Policy:
    """The policy of one call: argument before `use(...)` before the environment."""
    policy = current()
    if not policy.platforms:
        chosen = environment_platforms(operation)
        if chosen:
            policy = dataclasses.replace(policy, platforms=chosen, source="environment")
    forbidden = _environment_forbid()
    if forbidden:
        policy = dataclasses.replace(policy, forbid=policy.forbid | forbidden)
    names = _as_names("platform", (platform,) if isinstance(platform, str) else platform or ())
    if names:
        policy = dataclasses.replace(policy, platforms=names, source="argument")
    _refuse_contradiction(policy)
    return policy


def _refuse_contradiction(policy: Policy) -> None:
    if policy.platforms and policy.forbid.issuperset(policy.platforms):
        raise invalid(
            "platform",
            ", ".join(policy.platforms),
            "at least one platform that is not forbidden",
            remedy=f"forbidden here: {', '.join(sorted(policy.forbid))}",
        )


def _as_names(argument: str, values: Iterable[Any]) -> tuple[str, ...]:
    names = []
    for value in (values,) if isinstance(values, str) else values:
        if not isinstance(value, str):
            raise wrong_type(argument, repr(value), "the name of a platform, such as 'xla'")
        names.append(str(value).lower())
    if "auto" in names:
        if len(names) > 1:
            raise invalid(argument, ", ".join(names), "'auto' alone, or platforms without 'auto'")
        return ()
    _check_known(argument, tuple(names))
    return tuple(names)


def _check_known(argument: str, names: tuple[str, ...]) -> None:
    from ejkernel._registry import kernel_registry

    for name in names:
        kernel_registry.check_platform(argument, name)


def environment_platforms(operation: str) -> tuple[str, ...]:
    """What `EJKERNEL_PLATFORM` says for an operation, e.g. `flash_attention=triton,xla;*=xla`."""
    table = _environment_table()
    return table.get(operation, table.get("*", ()))


@functools.cache
def _environment_table() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in os.environ.get("EJKERNEL_PLATFORM", "").split(";"))):
        operation, separator, names = entry.rpartition("=")
        table[operation.strip() if separator else "*"] = _as_names("EJKERNEL_PLATFORM", _split(names))
    return table


@functools.cache
def _environment_forbid() -> frozenset[str]:
    return frozenset(_as_names("EJKERNEL_FORBID", _split(os.environ.get("EJKERNEL_FORBID", ""))))


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
