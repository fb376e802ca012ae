"""What a kernel of one's own defines, and `Invocation`: one call of it or of a public function."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
from jax.core import Tracer

from ejkernel._dispatch.explanation import explain
from ejkernel._pipeline.operation import get_operation
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.decision import Decision
from ejkernel.call.policy import Policy, current_policy
from ejkernel.call.request import Request
from ejkernel.configs.key import canonical_json, encode, running_versions
from ejkernel.errors import NoKernelError, invalid, wrong_type
from ejkernel.targets.target import resolve_target
from ejkernel.tuning import Key

Cfg = TypeVar("Cfg")
Out = TypeVar("Out")

IMPLEMENTATION = "kernel"
"""Id of a `Kernel`'s code in keys and overlays."""


class KernelDefinition(abc.ABC, Generic[Cfg, Out]):
    """What a subclass of `Kernel`, where all is documented, defines."""

    op_id: str = ""
    version: ClassVar[int] = 1

    def __init__(self, op_id: str | None = None) -> None:
        self.op_id = op_id or type(self).op_id or type(self).__name__
        if not isinstance(self.op_id, str):
            raise wrong_type("op_id", repr(self.op_id), "a name")
        if self.op_id in OPERATIONS or {"/", ":"} & {*self.op_id}:
            raise invalid("op_id", repr(self.op_id), "a name without / and : that no operation in core has")

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as `run` takes them; called once, before the config is chosen."""
        return args, kwargs

    @abc.abstractmethod
    def run(self, *args: Any, cfg: Cfg, **kwargs: Any) -> Out:
        """Compute the result with this config."""

    @abc.abstractmethod
    def heuristic_cfg(self, inv: Invocation) -> Cfg:
        """A config that is legal for this call: the last tier."""

    def candidate_cfgs(self, inv: Invocation) -> Iterable[Cfg]:
        """The legal configs of a call, for a search."""
        return (self.heuristic_cfg(inv),)

    def fwd_with_residuals(self, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Out, Any]:
        """The result and what `vjp` needs. Defined together with `vjp`, or not at all: then JAX differentiates `run`."""
        raise NotImplementedError(f"{type(self).__name__} defines no fwd_with_residuals")

    def vjp(self, residuals: Any, y: Out, dy: Out, *args: Any, cfg: Cfg, **kwargs: Any) -> tuple[Any, ...]:
        """Gradients of all positional arguments, which then must be arrays or pytrees of arrays."""
        raise NotImplementedError(f"{type(self).__name__} defines no vjp")

    def compute(self, inv: Invocation, cfg: Cfg) -> Out:
        """Run a prepared call with a config; gradients are the kernel's own if it defines them."""
        own = [getattr(type(self), name) is not getattr(KernelDefinition, name) for name in ("fwd_with_residuals", "vjp")]
        if any(own) and not all(own):
            raise invalid(type(self).__name__, "one of fwd_with_residuals and vjp", "both, or neither")
        run = functools.partial(self.run, cfg=cfg, **inv.kwargs)
        with jax.named_scope(f"ejkernel.{self.op_id}[{IMPLEMENTATION}]"):
            return _with_gradients(self, run, inv, cfg)(*inv.args) if all(own) else run(*inv.args)


def _with_gradients(kernel: KernelDefinition[Any, Any], run: Any, inv: Invocation, cfg: Any) -> Any:
    def forward(*args: Any) -> Any:
        y, residuals = kernel.fwd_with_residuals(*args, cfg=cfg, **inv.kwargs)
        return y, (residuals, y, args)

    def backward(saved: Any, dy: Any) -> Any:
        residuals, y, args = saved
        return tuple(kernel.vjp(residuals, y, dy, *args, cfg=cfg, **inv.kwargs))

    differentiable = jax.custom_vjp(run)
    differentiable.defvjp(forward, backward)
    return differentiable


@dataclasses.dataclass(frozen=True, eq=False)
class Invocation:
    """One call: of a public function, by its name, or of a `Kernel`.

    Attributes:
        op_id: name of the public function, e.g. "flash_attention", or the kernel's own.
        args: positional arguments, as arrays or `jax.ShapeDtypeStruct`s.
        kwargs: keyword arguments.
        override_cfg: what `cfg=` says.
        kernel: the kernel; None for a public function.
    """

    op_id: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    override_cfg: Any = None
    kernel: KernelDefinition[Any, Any] | None = None

    @classmethod
    def of(cls, operation: Any, *args: Any, cfg: Any = None, **kwargs: Any) -> Invocation:
        """The call `operation(*args, cfg=cfg, **kwargs)` of a kernel, a public function, its class API or its name."""
        if isinstance(operation, KernelDefinition):
            args, kwargs = operation.prepare(*args, **kwargs)
            return cls(operation.op_id, args, kwargs, cfg, operation)
        name = operation if isinstance(operation, str) else getattr(operation, "function", operation).__name__
        return cls(name, args, kwargs, cfg)

    def decision(self) -> Decision:
        """What the dispatcher would do with the forward phase of a public function."""
        options = {} if self.override_cfg is None else {"cfg": self.override_cfg}
        return explain(self.op_id, *self.args, **self.kwargs, **options).forward

    def key(self) -> Key:
        """What its config is stored under, for the forward phase.

        Raises:
            TypeError: an argument has no JSON form.
            NoKernelError: nothing runs it here.
        """
        if self.kernel is None:
            return _key_of_decision(self.decision())
        target = resolve_target(self._arrays(), current_policy().target)
        place = (target.backend, target.device_kind, target.compute_capability or "")
        return Key(self.op_id, "forward", IMPLEMENTATION, self.kernel.version, self._call_text(), *place, *running_versions())

    @property
    def call_key(self) -> str:
        """SHA-256 of what is called, with the shapes and dtypes of arrays, apart from where and by which version."""
        return hashlib.sha256(f"{self.op_id} {self.key().call}".encode()).hexdigest()

    def is_traced(self) -> bool:
        """Whether JAX is tracing it, or it has no arrays at all."""
        return any(isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)) for leaf in self._arrays())

    def _arrays(self) -> list[Any]:
        return [leaf for leaf in jax.tree.leaves((self.args, dict(self.kwargs))) if hasattr(leaf, "shape")]

    def _call_text(self) -> str:
        leaves, tree = jax.tree.flatten((self.args, dict(self.kwargs)))
        described = [ArraySpec.of(leaf) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        return canonical_json({"arguments": encode(described, self.op_id), "tree": str(tree)})


def _key_of_decision(decision: Decision) -> Key:
    if decision.chosen is None:
        raise NoKernelError(str(decision), decision)
    request = Request(get_operation(decision.operation), decision.call, decision.target, Policy())
    return Key.of(request, decision.phase, decision.chosen)
