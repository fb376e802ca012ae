"""What an adapter is: operations that a package can compute, and how it is called for each."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from packaging.version import Version

from ejkernel_bench._problem import BenchProblem
from ejkernel_bench._program import Function, Program, jax_peer

Builder = Callable[[Any, Any], "Function | Built | str"]
"""From a canonical call and its inputs to the function, or to the reason why the package cannot do just this."""

_ALWAYS = frozenset({"save_residuals"})


@dataclasses.dataclass(frozen=True)
class Built:
    """A peer's function with what belongs before and after it, which is not timed.

    Attributes:
        function: from what `prepare` returned to public outputs by name.
        prepare: from canonical inputs to the package's own, again a NamedTuple or a mapping by name.
        gradients: from gradients of what was prepared, and that, to gradients of canonical inputs.
        refuses_backward: why there is no backward phase; empty if there is one.
    """

    function: Callable[[Any], Mapping[str, Any]]
    prepare: Callable[[Any], Any] = lambda inputs: inputs
    gradients: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = lambda found, prepared: found
    refuses_backward: str = ""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One adapter.

    Attributes:
        name: as results call it.
        builders: by operation.
        modules: import packages that must be there.
        distributions: whose versions are written down; minimal versions as `{"name": "1.2"}` values, or "".
        backends: where it runs.
        framework: whose arrays it takes.
    """

    name: str
    builders: Mapping[str, Builder]
    modules: Sequence[str] = ()
    distributions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    backends: Sequence[str] = ("cpu", "gpu", "tpu")
    framework: Literal["jax", "torch"] = "jax"

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(self.builders)

    def missing(self) -> str | None:
        """Why it is not there; None if it is. Nothing is imported."""
        absent = [name for name in self.modules if not _importable(name)]
        if absent:
            return f"not installed: {', '.join(absent)}"
        for name, least in self.distributions.items():
            installed = _version(name)
            if least and installed is not None and installed < Version(least):
                return f"needs {name} >= {least}, {installed} is installed"
        return None

    def unable(self, backend: str) -> str | None:
        """Why it can run nothing on this backend here; None if it can. Of what is there, its framework is asked for a device."""
        if reason := self.missing() or self._elsewhere(backend):
            return reason
        if self.framework == "torch" and backend == "gpu":
            from ejkernel_bench.peers._torch import no_gpu

            return no_gpu()
        return None

    def _elsewhere(self, backend: str) -> str | None:
        return None if backend in self.backends else f"runs on {'/'.join(self.backends)}, the target is {backend}"

    def build(self, operation: str, call: Any, inputs: Any) -> Function | Built | str:
        """The function for a call, or why there is none."""
        return self.builders[operation](call, inputs)

    def program(self, problem: BenchProblem, sets: Sequence[Any], rounds: int) -> Program | str:
        """What is checked and timed, or why there is nothing."""
        backend = problem.request.target.backend
        if reason := self._elsewhere(backend):
            return reason
        built = self.build(problem.selected.operation, problem.request.call, problem.base)
        if isinstance(built, str):
            return built
        if self.framework == "jax":
            return jax_peer(problem, built.function if isinstance(built, Built) else built, sets, rounds)
        from ejkernel_bench.peers._torch import torch_peer

        return torch_peer(problem, built if isinstance(built, Built) else Built(built), sets)


def beyond(call: Any, *known: str) -> str | None:
    """Why a call is more than a package knows: the fields outside of `known` that are not at their default."""
    default = {field.name: field.default for field in dataclasses.fields(call)}
    extra = [name for name, value in default.items() if name not in {*known, *_ALWAYS} and getattr(call, name) != value]
    return f"does not do {', '.join(extra)}" if extra else None


def same_heads(call: Any) -> str | None:
    """Why a call is more than a package knows that has no groups of heads."""
    heads = {spec.shape[2] for spec in (call.query, call.key, call.value)}
    return None if len(heads) == 1 else "takes as many heads of keys as of values"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that the name is inside of
        return False


def _version(distribution: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None
