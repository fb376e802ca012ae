"""The Operation: canonicalise -> differentiate -> batch -> partition -> dispatch.

An operation is declared once in `ejkernel.operations`; this module turns the declaration into a function that works under
every JAX transformation, whatever platform runs it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from ejkernel._dispatch import explanation
from ejkernel._dispatch.execution import run_forward
from ejkernel._pipeline import typecheck
from ejkernel._pipeline.batching import batched_backward, batched_forward
from ejkernel._pipeline.values import refuse_foreign
from ejkernel._plugins.catalog import operation_module
from ejkernel.call.arrays import has_gradient, named
from ejkernel.call.contract import Contract
from ejkernel.call.decision import Explanation
from ejkernel.call.partition import unify_manual_axes, with_empty, without_empty
from ejkernel.call.policy import PlatformChoice, Policy, policy_for_call
from ejkernel.call.records import Bound
from ejkernel.call.request import Request
from ejkernel.call.traced import split_traced, with_traced
from ejkernel.configs.portable import demanded_platform
from ejkernel.configs.spaces import as_setting
from ejkernel.errors import wrong_type
from ejkernel.targets import Target, resolve_target
from ejkernel.utils.spelled import Spelled
from ejkernel.utils.tracing import refuse_traced


class Operation(Contract):
    """A contract with the way from a public function's arguments to what it returns."""

    def invoke(
        self,
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        platform: PlatformChoice = None,
        cfg: Any = None,
        form: Callable[..., Bound] | None = None,
    ) -> Any:
        """Run the operation as a public function does.

        Args:
            arrays: keyword arguments of `canonicalise` that hold arrays (any pytree; None where absent).
            options: its other keyword arguments; `static_options` makes them hashable. Those of `traceable` may be traced, and
                `canonicalise` then gets them so.
            platform: None or "auto", one platform, or several in order of preference.
            cfg: config override for the chosen implementation: its dataclass, a mapping of its fields, or a portable config of
                `ejkernel.modules.operations.configs`, which may also demand a platform.
            form: another entry point to the same operation, with `canonicalise`'s contract.

        Returns:
            What the `Bound` that `form` returned makes of the outputs.
        """
        platform, cfg = _demands(platform, cfg)
        policy = policy_for_call(self.name, platform)
        traced, options = split_traced(options, self.traceable)
        arrays = {**arrays, **traced}
        for name, value in arrays.items():
            if isinstance(value, list):
                raise wrong_type(name, "list", "an array")
        leaves = jax.tree.leaves(arrays)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float)):
                name = next(name for name, value in arrays.items() if any(one is leaf for one in jax.tree.leaves(value)))
                raise wrong_type(name, type(leaf).__name__, "an array")
        target = resolve_target(leaves, policy.target)
        static = static_options(options)
        invocation = _Invocation(
            self, form, static, policy, target, cfg, (*[_spelling(value) for _, value in static], _spelling(cfg))
        )
        try:
            if explanation.capturing():
                raise explanation.Captured(invocation.explain(arrays))
            self.check_values(arrays)
            if (run := _run_by.get()) is not None:
                # One program, also inside a shard_map that is not compiled itself.
                return jax.jit(functools.partial(_bound_and_run, invocation, run=run))(dict(arrays))
            return _invoke(invocation, dict(arrays))
        except TypeError as error:
            for name, value in arrays.items():
                for leaf in jax.tree.leaves(value):
                    refuse_foreign(name, leaf)
            if _NO_JVP in str(error):
                raise TypeError(f"{self.name}: {error} {_PLAIN_JAX}") from error
            raise

    def run(self, request: Any, inputs: Any) -> Any:
        """Run a canonical request on canonical inputs; differentiable, batchable, partitionable. Returns Outputs."""
        inputs = unify_manual_axes(inputs)
        if not request.policy.custom_gradients:
            return run_forward(request, inputs)
        return _differentiable(request, inputs)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


def get_operation(name: str) -> Operation:
    """The operation of this name, whoever brings it.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    return operation_module(name, "interface").OPERATION


@dataclasses.dataclass(frozen=True)
class _Invocation:
    """Everything static about one public call; the key under which its program is cached."""

    operation: Operation
    form: Callable[..., Bound] | None
    options: tuple[tuple[str, Any], ...]
    policy: Policy
    target: Target
    config: Any
    spelling: Any
    """Types of the options and of the config: 1 == True == 1.0, and what one of them is refused for must not depend on another."""

    def bind(self, arrays: Mapping[str, Any]) -> tuple[Bound, Request]:
        bound = (self.form or self.operation.canonicalise)(**with_traced(arrays, dict(self.options)))
        return bound, Request(self.operation, bound.call, self.target, self.policy, self.config)

    def explain(self, arrays: Mapping[str, Any]) -> Explanation:
        found: list[Request] = []
        jax.eval_shape(lambda values: found.append(self.bind(values)[1]), dict(arrays))
        return explanation.explain_request(found[0])


@functools.partial(jax.jit, static_argnums=0)
def _invoke(invocation: _Invocation, arrays: dict[str, Any]) -> Any:
    return _bound_and_run(invocation, arrays, invocation.operation.run)


def _bound_and_run(invocation: _Invocation, arrays: dict[str, Any], run: Callable[[Request, Any], Any]) -> Any:
    bound, request = invocation.bind(arrays)
    outputs = run(request, bound.inputs)
    if typecheck.on():
        typecheck.check_records(bound.inputs, outputs)
    return bound.finish(outputs)


_run_by: contextvars.ContextVar[Callable[[Request, Any], Any] | None] = contextvars.ContextVar("ejkernel_run_by", default=None)


@contextlib.contextmanager
def run_by(run: Callable[[Request, Any], Any]) -> Generator[None]:
    """Inside the `with` block `run(request, inputs) -> outputs` takes the place of `Operation.run` in every public call."""
    token = _run_by.set(run)
    try:
        yield
    finally:
        _run_by.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(request: Request, inputs: Any) -> Any:
    return _public(request, batched_forward(request, inputs))


def _differentiable_forward(request: Request, inputs: Any) -> Any:
    from jax.ad_checkpoint import checkpoint_name

    outputs: Any = _once(batched_forward, request.saving_residuals(), inputs)
    tagged = {name: checkpoint_name(value, f"{request.operation.name}.{name}") for name, value in named(outputs)}
    outputs = request.operation.Outputs(**{**dict.fromkeys(outputs._fields), **tagged})
    return _public(request, outputs), without_empty((inputs, outputs))


def _differentiable_backward(request: Request, residuals: Any, cotangents: Any) -> Any:
    inputs, outputs = with_empty(residuals)
    cotangents = type(cotangents)(*(one if one is not None and has_gradient(one) else None for one in cotangents))
    return (_once(batched_backward, request.saving_residuals(), inputs, outputs, cotangents),)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _once(phase: Callable[..., Any], request: Request, *arrays: Any) -> Any:
    """Run a phase of a call that is being differentiated; differentiating it again is refused, as kernels have no rule for it."""
    return phase(request, *arrays)


def _refuse_second_order(phase: Callable[..., Any], request: Request, primals: Any, tangents: Any) -> Any:
    raise TypeError(
        f"{request.operation.name}: its gradient was differentiated again, for which there is no kernel. {_PLAIN_JAX}"
    )


_once.defjvp(_refuse_second_order)
_NO_JVP = "forward-mode autodiff (jvp) to a custom_vjp"
_PLAIN_JAX = (
    'For jvp, Hessians and gradients of gradients run the function under `with ejkernel.use("xla", custom_gradients=False):`, '
    "which differentiates plain JAX code."
)

_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


def _public(request: Request, outputs: Any) -> Any:
    visible = request.operation.public(request.call)
    return type(outputs)(**{name: getattr(outputs, name) if name in visible else None for name in outputs._fields})


_PLAIN = frozenset((bool, int, float, str, type(None)))
_SPELT = _PLAIN - {float}


def static_options(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as hashable Python values, to be part of the key of a compiled program.

    Lists become tuples and arrays of one element numbers.

    Raises:
        TypeError: a traced value, or an array of several.
    """
    return tuple([(name, value if type(value) in _PLAIN else _static(name, value)) for name, value in options.items()])


def _static(name: str, value: Any) -> Any:
    if isinstance(value, type):  # a dtype
        return value
    refuse_traced(name, value)
    if isinstance(value, (list, tuple)):
        return tuple([_static(name, item) for item in cast("Sequence[Any]", value)])
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        if value.size != 1:
            raise wrong_type(name, f"an array of shape {value.shape}", "a Python value")
        return value.item()
    if not isinstance(value, Hashable):
        raise wrong_type(name, type(value).__name__, "a Python value that can be hashed")
    return value


def _spelling(value: Any) -> Any:
    """What equality does not tell apart: the types of a static value's parts, and the sign of zero."""
    kind = type(value)
    if kind in _SPELT:
        return kind
    if kind is tuple:
        return tuple([_spelling(part) for part in value])
    if kind is float and value == 0:
        return math.copysign(1.0, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Spelled)):
        return kind, tuple([_spelling(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return kind


def _demands(platform: PlatformChoice, cfg: Any) -> tuple[PlatformChoice, Any]:
    """Platform and config of a call, either of which `cfg=` may say."""
    if cfg is None:
        return platform, None
    return demanded_platform(cfg, platform), as_setting("cfg", cfg)
