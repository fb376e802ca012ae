"""`kernel_registry`: every implementation that was discovered or registered, and the public way to look one up."""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ejkernel._notebook import table
from ejkernel._plugins import validation
from ejkernel._plugins.catalog import OPERATIONS, public_function
from ejkernel._plugins.containment import imported, refuse_answers, refuse_plugins
from ejkernel._plugins.epoch import bump_epoch
from ejkernel._plugins.records import Candidate, PluginRecord
from ejkernel.errors import NoKernelError, invalid, suggestion, wrong_type
from ejkernel.plugin import FIRST_PARTY, Implementation, Phase
from ejkernel.targets import resolve_target

Function = TypeVar("Function", bound=Callable[..., Any])


class Platform(enum.StrEnum):
    """Names of the first-party platforms, for completion in editors. Any other string names a platform just as well."""

    XLA = "xla"
    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    AUTO = "auto"


class Backend(enum.StrEnum):
    """Kinds of device, in JAX's words."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    ANY = "any"


class KernelRegistry:
    """Holds candidates by (operation, phase). Thread-safe; every change retraces programs that dispatched before it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: tuple[PluginRecord, ...] = ()
        self._candidates: dict[tuple[str, str], list[Candidate]] = {}
        self.epoch = 0

    def __repr__(self) -> str:
        lines = [f"\n  {name} ({origin}): {state}" for name, origin, state, *_ in self._rows()]
        return f"<KernelRegistry: {len(self.list_operations())} operations{''.join(lines)}>"

    def _repr_html_(self) -> str:
        title = f"{len(self.list_operations())} operations"
        return table(title, ("platform", "from", "state", "operations", "implementations"), self._rows())

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        """Platforms: name, who brings it, state, and how many operations and implementations it has."""
        origins = {record.name: (f"{record.distribution} {record.version}", record.state) for record in self._records}
        own = [c for c in self.list_implementations() if c.origin == "registered"]
        origins = {**{candidate.platform: (candidate.distribution, "ok") for candidate in own}, **origins}
        rows: list[tuple[str, str, str, str, str]] = []
        for name, (origin, state) in sorted(origins.items()):
            found = [c.implementation.operation for c in self.list_implementations() if c.platform == name]
            rows.append((name, origin.strip(), state, str(len({*found})), str(len(found))))
        return rows

    # Filling

    def load(self, records: Iterable[PluginRecord]) -> None:
        """Take over the outcome of discovery, in place of an earlier one. Run-time registrations stay."""
        refuse_answers("kernel_registry.load")
        with self._lock:
            self._records = tuple(sorted(records, key=lambda record: (record.name, record.distribution)))
            for key, known in self._candidates.items():
                self._candidates[key] = [candidate for candidate in known if candidate.origin == "registered"]
            for record in self._records:
                if record.ok and record.plugin is not None:
                    origin = "first-party" if record.first_party else "third-party"
                    for implementation in record.plugin.implementations:
                        self._add(Candidate(record.name, implementation, record.distribution, record.version, origin))
            self._changed()

    def register(
        self,
        algorithm: str,
        platform: str,
        backend: str = "any",
        priority: int = 0,
        *,
        phase: Phase = "forward",
        supports: Callable[..., str | None] | None = None,
        variant: str = "",
        **record: Any,
    ) -> Callable[[Function], Function]:
        """Decorate a function of one's own, so that it takes part in selection with its priority.

        For the name of a core operation the function must follow `ejkernel.plugin.Implementation.target`; under any other
        name it is called as it is. This is for the program of a user; a plugin describes its implementations instead.

        Args:
            algorithm: name of the operation.
            platform: name of the platform. For a core operation no first-party one, as what these run is their own.
            backend: kind of device that it runs on.
            priority: larger is preferred.
            phase: `"forward"` or `"backward"`.
            supports: `(call, target) -> None | reason`.
            variant: tells it apart from the platform's other implementations.
            **record: further fields of `Implementation`.

        Returns:
            A decorator that returns the function unchanged.

        Raises:
            ValueError: unknown backend or phase, a first-party platform for a core operation, or the same id registered twice.
            TypeError: the decorated object cannot be called.
            PluginError: called by a plugin.
        """
        refuse_plugins("kernel_registry.register")
        _check_backend(str(backend))
        if phase not in ("forward", "backward"):
            raise invalid("phase", repr(phase), "'forward' or 'backward'")
        _check_own_platform(algorithm, str(platform))

        def decorate(function: Function) -> Function:
            refuse_plugins("kernel_registry.register", function)
            if not callable(function):
                raise wrong_type("register", type(function).__name__, "a function to decorate")
            implementation = Implementation(
                operation=algorithm,
                target=function,
                phase=phase,
                backends=(str(backend),),
                supports=supports,
                variant=variant,
                priority=priority,
                **record,
            )
            if complaint := validation.implementation(implementation):
                raise ValueError(complaint)
            candidate = Candidate(str(platform), implementation, "(this process)", "", "registered")
            with self._lock:
                for known in self.candidates(algorithm, phase):
                    if (known.id, known.implementation.backends) == (candidate.id, candidate.implementation.backends):
                        raise invalid(
                            "register",
                            f"{candidate.id!r} for {algorithm} on {backend} a second time",
                            "an id that is free",
                            remedy="pass variant='...' or unregister(...) first",
                        )
                self._add(candidate)
                self._changed()
            return function

        return decorate

    def unregister(self, algorithm: str, platform: str, *, phase: Phase = "forward", variant: str = "") -> None:
        """Take back a registration made at run time."""
        refuse_plugins("kernel_registry.unregister")
        with self._lock:
            known = self._candidates.get((algorithm, phase), [])
            wanted = f"{platform}.{variant}" if variant else str(platform)
            kept = [candidate for candidate in known if candidate.origin != "registered" or candidate.id != wanted]
            if len(kept) == len(known):
                raise KeyError(f"unregister: {wanted!r} is not registered for {algorithm} ({phase})")
            self._candidates[algorithm, phase] = kept
            self._changed()

    def _add(self, candidate: Candidate) -> None:
        key = (candidate.implementation.operation, candidate.implementation.phase)
        # A new list: another thread may be reading the old one, and a list that is being sorted looks empty.
        self._candidates[key] = sorted([*self._candidates.get(key, ()), candidate], key=lambda known: known.id)

    def refresh(self) -> None:
        """Have programs that dispatched before traced again, as something that decides for them changed (a tuned config)."""
        with self._lock:
            self._changed()

    def _changed(self) -> None:
        self.epoch += 1
        bump_epoch(self.epoch)

    # Looking up

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """Every plugin that was found, whatever became of it."""
        return self._records

    def candidates(self, operation: str, phase: Phase = "forward") -> tuple[Candidate, ...]:
        """Everything that could run one phase of an operation, in alphabetical order."""
        return tuple(self._candidates.get((operation, phase), ()))

    def list_operations(self) -> list[str]:
        """Names of core's operations and of everything registered."""
        return sorted({*OPERATIONS, *(name for name, _ in self._candidates)})

    list_algorithms = list_operations

    def list_platforms(self, algorithm: str | None = None) -> list[str]:
        """Platforms that are usable, or that implement one operation."""
        known = (c for (name, _), found in self._candidates.items() if algorithm in (None, name) for c in found)
        return sorted({candidate.platform for candidate in known})

    def list_implementations(self, algorithm: str | None = None) -> list[Candidate]:
        """Every candidate, or those of one operation, both phases."""
        found = (c for (name, _), known in self._candidates.items() if algorithm in (None, name) for c in known)
        return sorted(found, key=lambda c: (c.implementation.operation, c.implementation.phase, c.id))

    def get(self, algorithm: str, platform: str | None = None, backend: str | None = None) -> Callable[..., Any]:
        """Look up what can be called.

        For a core operation this is its public function, held to the platform if one is given. For a name of one's own it is
        the registered function with the highest priority for this machine.

        Args:
            algorithm: name of the operation.
            platform: name of the platform; None chooses the best.
            backend: kind of device; None means this machine's.

        Raises:
            ValueError: unknown operation, platform or backend.
            NoKernelError: nothing is registered for this platform and backend.
        """
        _check_backend(backend)
        name = None if platform in (None, "auto") else str(platform)
        if algorithm not in self.list_operations():
            raise invalid("algorithm", repr(algorithm), "an operation" + suggestion(algorithm, self.list_operations()))
        if name is not None:
            self.check_platform("platform", name)
        wanted = str(backend) if backend not in (None, "any") else None
        if wanted is None and algorithm not in OPERATIONS:
            wanted = resolve_target(()).backend if backend is None else None
        admitted = [
            c
            for c in self.candidates(algorithm)
            if name in (None, c.platform) and (wanted is None or {"any", wanted} & {*c.implementation.backends})
        ]
        if not admitted:
            have = ", ".join(f"{c.id} ({'/'.join(c.implementation.backends)})" for c in self.candidates(algorithm)) or "none"
            raise NoKernelError(
                f"{algorithm}: nothing for platform {name or 'any'} on backend {wanted or 'any'}; registered: {have}. "
                "Run `ejkernel list` to see what is installed."
            )
        if algorithm in OPERATIONS:
            function = public_function(algorithm)
            return function if name is None else functools.partial(function, platform=name)
        chosen = max(admitted, key=lambda c: c.implementation.priority)
        return imported(f"{chosen.id} ({algorithm})", chosen.implementation.target)

    def check_platform(self, argument: str, name: str) -> None:
        """Refuse a platform or implementation id (`"cuda.cudnn"`) that nothing installed is called, with what to do about it."""
        ids = (candidate.id for candidate in self.list_implementations())
        known = {*self.list_platforms(), *ids, *(record.name for record in self._records)}
        if name in known:
            return
        if name in FIRST_PARTY:
            raise invalid(argument, repr(name), "an installed platform", remedy=f"pip install {FIRST_PARTY[name]}")
        raise invalid(argument, repr(name), "an installed platform" + suggestion(name, {*known, *FIRST_PARTY}))


def _check_own_platform(algorithm: str, platform: str) -> None:
    """A registration must not pass for a plugin's: `platform="xla"` runs what the distribution of that name brings."""
    complaint = validation.platform_name(platform)
    if complaint:
        raise invalid("platform", repr(platform), "lower-case letters, digits, '_' and '-', beginning with a letter")
    if algorithm in OPERATIONS and platform in FIRST_PARTY:
        raise invalid(
            "platform",
            repr(platform),
            f"a name of your own, as {algorithm} is an operation of ejkernel and {platform!r} belongs to {FIRST_PARTY[platform]}",
            remedy="pass for example platform='mine'",
        )


def _check_backend(backend: str | None) -> None:
    names = [member.value for member in Backend]
    if backend is not None and str(backend) not in names:
        raise invalid("backend", repr(backend), f"one of {', '.join(names)}")


kernel_registry = KernelRegistry()
