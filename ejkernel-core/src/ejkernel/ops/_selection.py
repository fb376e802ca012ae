"""`ConfigSelectorChain`: the tiers of config selection, for kernels of one's own and for public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from ejkernel.call.policy import closing_tiers, current_policy, heuristics_allowed
from ejkernel.configs.overlay import Selector
from ejkernel.configs.select import no_config_without_heuristic, stored_tiers
from ejkernel.configs.spaces import build
from ejkernel.errors import NoConfigError, NoTunerError, wrong_type
from ejkernel.ops._caches import ConfigCache, PersistentCache
from ejkernel.ops._kernel import IMPLEMENTATION, Invocation, KernelDefinition
from ejkernel.ops._policy import AutotunePolicy
from ejkernel.tuning import Key, KeyedConfigs, Selected, Tuner, as_setting, from_plain, record_calls, tune
from ejkernel.utils.tracing import is_tracing
from ejkernel.utils.warn_once import warn_once

_ALL = object()


class ConfigSelectorChain:
    """Chooses configs in seven tiers: override, overlay, memory, persistent, autotune, heuristic, error.

    The stores are those of the process and of the user, which the dispatcher reads for every call; what a selector adds is its
    policy, which holds for calls made through it.

    Args:
        cache: `ConfigCache()`, or None to leave the tier "memory" out.
        policy: what it may do when nothing is stored.
        tuner: searches configs; None takes the installed one.
        persistent: `PersistentCache()`, or None to leave out the tier "persistent" (the user's cache and shipped tables).
        persist_autotune: write what was tuned to the user's cache, beside the process's store.
    """

    def __init__(
        self,
        cache: Any = _ALL,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: Any = _ALL,
        *,
        persist_autotune: bool = False,
    ) -> None:
        self.cache = _store("cache", cache, ConfigCache)
        self.persistent = _store("persistent", persistent, PersistentCache)
        self.policy = policy or AutotunePolicy()
        self.tuner = tuner
        self.persist_autotune = persist_autotune

    def choose(self, inv: Invocation, kernel: KernelDefinition[Any, Any] | None = None) -> Any:
        """The config that a call would run with; None for an implementation without knobs.

        Args:
            inv: the call.
            kernel: its kernel, if `inv` does not say.

        Raises:
            NoConfigError: no tier has one.
            NoTunerError: the policy asks for tuning a `Kernel` on a miss.
            ValueError, TypeError: an override or overlay that does not fit.
        """
        return self.select(inv, kernel).config

    def select(self, inv: Invocation, kernel: KernelDefinition[Any, Any] | None = None) -> Selected:
        """As `choose`, with the tier that answered."""
        kernel = kernel or inv.kernel
        with self._in_force():
            if kernel is not None:
                return self._of_kernel(Invocation(kernel.op_id, inv.args, inv.kwargs, inv.override_cfg, kernel), kernel)
            decision = inv.decision()
            return Selected(decision.config, decision.tier)

    def call(self, operation: Any, *args: Any, cfg: Any = None, **kwargs: Any) -> Any:
        """Run a kernel, a public function or its class API with the config that is chosen for it."""
        if isinstance(operation, KernelDefinition):
            inv = Invocation.of(operation, *args, cfg=cfg, **kwargs)
            return operation.compute(inv, self.choose(inv))
        options = kwargs if cfg is None else {**kwargs, "cfg": cfg}
        with self._in_force():
            self._tune_misses(operation, args, options)
            return operation(*args, **options)

    @contextlib.contextmanager
    def _in_force(self) -> Generator[None]:
        closed = {"memory": self.cache is None, "persistent": self.persistent is None}
        closed["heuristic"] = not self.policy.allow_heuristics
        with closing_tiers(name for name, is_closed in closed.items() if is_closed):
            yield

    def _tune_misses(self, operation: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Tune the calls of a program that only a heuristic knows a config for; never while JAX traces."""
        if not self.policy.tunes or is_tracing() or Invocation("", args, options).is_traced():
            return
        with heuristics_allowed():
            calls = [call for call in record_calls(lambda: operation(*args, **options)) if call.tier == "heuristic"]
        if calls:
            result = tune(calls, self.tuner)
            result.remember()
            if self.persist_autotune:
                result.store()

    def _of_kernel(self, inv: Invocation, kernel: KernelDefinition[Any, Any]) -> Selected:
        config = _override(inv, kernel)
        if config is not None:
            return Selected(config, "override")
        try:
            key = inv.key()
        except TypeError as error:
            warn_once(kernel.op_id, f"calls of it cannot be looked up in the tuning cache: {error}")
            key = None
        found = _overlaid(inv, kernel, key) or _stored(inv, kernel, key)
        if found is not None:
            return found
        if self.policy.tunes and not is_tracing() and not inv.is_traced():
            raise NoTunerError(
                f"{kernel.op_id}: the configs of a Kernel cannot be searched, as it has no reference to check them against; give "
                "them by cfg= or overlay_cache, or let the policy fall back to heuristics"
            )
        if "heuristic" in current_policy().closed_tiers:
            raise no_config_without_heuristic(kernel.op_id)
        return Selected(_heuristic(inv, kernel), "heuristic")


def _store(argument: str, given: Any, expected: type) -> Any:
    if given is _ALL:
        return expected()
    if given is not None and not isinstance(given, expected):
        raise wrong_type(argument, repr(given), f"{expected.__name__}() or None")
    return given


def _heuristic(inv: Invocation, kernel: KernelDefinition[Any, Any]) -> Any:
    config = kernel.heuristic_cfg(inv)
    if not hasattr(config, "__dataclass_fields__"):
        raise NoConfigError(f"{kernel.op_id}: its heuristic_cfg returned {config!r}, expected a config dataclass")
    return config


def _override(inv: Invocation, kernel: KernelDefinition[Any, Any]) -> Any:
    if inv.override_cfg is None:
        return None
    return _completed("cfg", as_setting("cfg", inv.override_cfg), inv, kernel)


def _completed(argument: str, setting: Any, inv: Invocation, kernel: KernelDefinition[Any, Any]) -> Any:
    """A setting as the kernel's config: a mapping is put over its heuristic."""
    base = _heuristic(inv, kernel)
    if isinstance(setting, tuple):
        return build(argument, type(base), dict(setting), base)
    if not isinstance(setting, type(base)):
        raise wrong_type(argument, repr(setting), f"{type(base).__name__}, or a mapping of its fields")
    return setting


def _overlaid(inv: Invocation, kernel: KernelDefinition[Any, Any], key: Key | None) -> Selected | None:
    for name, value in current_policy().overlay:
        if isinstance(value, KeyedConfigs):
            entry = value.lookup(key) if key is not None else None
            if entry is not None and entry.config is not None:
                return Selected(from_plain(type(_heuristic(inv, kernel)), entry.config), "overlay")
        elif Selector.parse(name).covers(IMPLEMENTATION, kernel.op_id, "forward"):
            return Selected(_completed(f"overlay_cache[{kernel.op_id}]", value, inv, kernel), "overlay")
    return None


def _stored(inv: Invocation, kernel: KernelDefinition[Any, Any], key: Key | None) -> Selected | None:
    if key is None:
        return None
    for lookup, tier in stored_tiers(current_policy()):
        entry = lookup(key)
        if entry is not None and isinstance(entry.config, Mapping):
            try:
                return Selected(from_plain(type(_heuristic(inv, kernel)), entry.config), tier)
            except (ValueError, TypeError) as error:
                warn_once(kernel.op_id, f"stored config ignored: {error}")
    return None
