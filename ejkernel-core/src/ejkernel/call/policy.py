"""Who may run a call: `use(...)`, the environment and the `platform=` argument, folded into one hashable policy.

A compiled `jit` is traced again under another policy; see `ejkernel._plugins.task_local`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Generator, Iterable, Sequence, Sized
from typing import Any

from ejkernel._plugins.registry import kernel_registry
from ejkernel._plugins.task_local import policy_in_force
from ejkernel.errors import invalid, suggestion, wrong_type
from ejkernel.plugin import FIRST_PARTY
from ejkernel.targets.target import Target, as_target

PlatformChoice = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class Policy:
    """The settings in force for one call.

    Attributes:
        platforms: the only ones to try, in this order; empty = automatic.
        forbid: never to be tried.
        custom_gradients: False gives plain JAX code that `jvp` and Hessians can differentiate.
        overlay: config overlays, innermost first: pairs of operation or implementation id and config.
        source: which setting named the platforms: "argument", "use", "environment" or "default".
        target: where programs will run, if that is not to be found out from the arrays.
        closed_tiers: tiers of config selection that must not answer: "memory", "persistent", "heuristic".
    """

    platforms: tuple[str, ...] = ()
    forbid: frozenset[str] = frozenset()
    custom_gradients: bool = True
    overlay: tuple[tuple[str, Any], ...] = ()
    source: str = "default"
    target: Target | None = None
    closed_tiers: frozenset[str] = frozenset()


_DEFAULT = Policy()


def current_policy() -> Policy:
    """The policy of the innermost `use(...)`, or the default."""
    return policy_in_force.get() or _DEFAULT


holding = policy_in_force.holding
"""`with holding(policy):` puts a policy in force as it is."""


@contextlib.contextmanager
def use(
    *platforms: str,
    forbid: Iterable[str] = (),
    custom_gradients: bool | None = None,
    target: Target | str | Any = None,
    overlay: Iterable[tuple[str, Any]] = (),
) -> Generator[Policy]:
    """Choose or forbid platforms for every ejkernel call inside the `with` block.

    Blocks nest: inner platforms replace outer ones, forbidden platforms add up.

    Args:
        platforms: the only platforms to try, in this order; none leaves the choice as it was.
        forbid: platforms that must not run.
        custom_gradients: False differentiates the implementation's own JAX code instead of calling backward kernels, which
            is what `jax.jvp`, `jax.hessian` and gradients of gradients need.
        overlay: see `ejkernel.overlay`.
        target: the device that programs are built for, where that is another than the arrays' (lowering for a GPU on a
            machine without one): a `Target`, or `"gpu"`, `"gpu:9.0"` (with its compute capability), `"tpu"`, `"cpu"`.

    Yields:
        The policy in force.

    Raises:
        ValueError: unknown platform, or one both asked for and forbidden.

    Example:
        >>> import jax, ejkernel
        >>> with ejkernel.use("xla"):
        ...     ejkernel.softmax(jax.numpy.zeros((2, 4))).shape
        (2, 4)
    """
    outer = current_policy()
    names = _as_names("use", platforms)
    forbidden = outer.forbid | frozenset(_as_names("forbid", forbid, installed=False))
    policy = dataclasses.replace(
        outer,
        platforms=names or outer.platforms,
        forbid=forbidden,
        custom_gradients=outer.custom_gradients if custom_gradients is None else custom_gradients,
        overlay=(*overlay, *outer.overlay),
        source="use" if names else outer.source,
        target=outer.target if target is None else as_target(target),
    )
    _refuse_contradiction(policy)
    with holding(policy):
        yield policy


@contextlib.contextmanager
def closing_tiers(tiers: Iterable[str]) -> Generator[None]:
    """Keep these tiers from answering inside the `with` block, beside those that are closed already."""
    outer, closed = current_policy(), frozenset(tiers)
    changed = dataclasses.replace(outer, closed_tiers=outer.closed_tiers | closed)
    with holding(changed) if closed else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def heuristics_allowed() -> Generator[None]:
    """Open the tier "heuristic" again inside the `with` block, for asking which calls have nothing better."""
    outer = current_policy()
    with holding(dataclasses.replace(outer, closed_tiers=outer.closed_tiers - {"heuristic"})):
        yield


def policy_for_call(operation: str, platform: PlatformChoice) -> Policy:
    """The policy of one call: argument before `use(...)` before the environment."""
    policy = current_policy()
    if not policy.platforms:
        chosen = environment_platforms(operation)
        if chosen:
            policy = dataclasses.replace(policy, platforms=chosen, source="environment")
    forbidden = _environment_forbid()
    if forbidden:
        policy = dataclasses.replace(policy, forbid=policy.forbid | forbidden)
    if platform is not None and not isinstance(platform, str) and isinstance(platform, Sized) and not len(platform):
        raise invalid(
            "platform", repr(platform), "at least one platform", remedy="None or 'auto' leaves the choice to ejkernel"
        )
    names = () if platform is None else _as_names("platform", platform)
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


def _as_names(argument: str, values: Iterable[Any], *, installed: bool = True) -> tuple[str, ...]:
    """Platform names in lower case. A first-party platform may be forbidden whether or not it is installed."""
    names = []
    if not isinstance(values, Iterable):
        raise wrong_type(argument, repr(values), "the name of a platform, such as 'xla', or several")
    for value in (values,) if isinstance(values, str) else values:
        if not isinstance(value, str):
            raise wrong_type(argument, repr(value), "the name of a platform, such as 'xla'")
        names.append(str(value).lower())
    if "auto" in names:
        if len(names) > 1:
            raise invalid(argument, ", ".join(names), "'auto' alone, or platforms without 'auto'")
        return ()
    for name in names:
        if installed or name not in FIRST_PARTY:
            kernel_registry.check_platform(argument, name)
    return tuple(names)


def environment_platforms(operation: str) -> tuple[str, ...]:
    """What `EJKERNEL_PLATFORM` says for an operation, e.g. `flash_attention=triton,xla;*=xla`."""
    table = _environment_table()
    return table.get(operation, table.get("*", ()))


@functools.cache
def _environment_table() -> dict[str, tuple[str, ...]]:
    table: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in os.environ.get("EJKERNEL_PLATFORM", "").split(";"))):
        operation, separator, names = entry.rpartition("=")
        operation = operation.strip() if separator else "*"
        known = kernel_registry.list_operations()
        if operation not in ("*", *known):
            raise invalid("EJKERNEL_PLATFORM", repr(operation), "an operation or *" + suggestion(operation, known))
        table[operation] = _as_names("EJKERNEL_PLATFORM", _split(names))
    return table


@functools.cache
def _environment_forbid() -> frozenset[str]:
    return frozenset(_as_names("EJKERNEL_FORBID", _split(os.environ.get("EJKERNEL_FORBID", "")), installed=False))


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
