"""The Operation: canonicalise -> differentiate -> batch -> partition -> dispatch.

An operation is declared once in `ejkernel.operations`; this module turns the declaration into a function that works under
every JAX transformation, whatever platform runs it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from ejkernel import _dispatch, _explain, _policy, _target
from ejkernel._arrays import ArraySpec, has_gradient, named
from ejkernel._batching import batched_backward, batched_forward
from ejkernel._partition import unify_manual_axes, vary_like
from ejkernel.errors import wrong_type
from ejkernel.operations._random import normal
from ejkernel.plugin import Phase, Target

__all__ = ["ArraySpec", "Bound", "Call", "Cost", "Operation", "Request", "vary_like"]


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
        """The dtype to whose tolerances results are held, whatever their own; None: to those of their own."""
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


@dataclasses.dataclass(frozen=True)
class Request:
    """The static part of one invocation: what, where, and under which settings.

    Attributes:
        operation: the operation.
        call: its canonical call.
        target: where it will run.
        policy: who may run it.
        config: override for the chosen implementation's config.
        native_only: why only implementations that XLA itself partitions will do here; empty if any will.
    """

    operation: Operation
    call: Any
    target: Target
    policy: _policy.Policy
    config: Any = None
    native_only: str = ""

    def reshaped(self, inputs: Any) -> Request:
        """The same request for arrays of other shapes (a folded batch, one shard)."""
        specs = {name: ArraySpec.of(value) for name, value in named(inputs)}
        return dataclasses.replace(self, call=dataclasses.replace(self.call, **specs))

    def saving_residuals(self) -> Request:
        return dataclasses.replace(self, call=dataclasses.replace(self.call, save_residuals=True))


class Operation(abc.ABC):
    """One mathematical function with one contract. Subclasses are stateless; one instance exists per name.

    Class attributes:
        name: as users and plugins write it.
        Call: subclass of `Call`.
        Inputs: NamedTuple of arrays (None where absent).
        Outputs: NamedTuple of what forward returns: the public outputs, then residuals (None unless `save_residuals`).
        differentiable: fields of `Inputs` that have a gradient, when they hold floats of two bytes or more.
        shardable: factors along which the operation may be split over devices without communication, except sums of
            gradients over factors that an input lacks. An axis of a factor may have different sizes in different arrays
            (query heads and key heads) as long as each divides by the number of shards.
    """

    name: ClassVar[str]
    Call: ClassVar[type]
    Inputs: ClassVar[type]
    Outputs: ClassVar[type]
    differentiable: ClassVar[tuple[str, ...]]
    shardable: ClassVar[tuple[str, ...]] = ("b",)

    @abc.abstractmethod
    def canonicalise(self, *args: Any, **kwargs: Any) -> Bound:
        """Check the arguments, resolve defaults and return the canonical call. The one door; behind it kernels may assume."""

    @abc.abstractmethod
    def dimensions(self, call: Any) -> Mapping[str, str]:
        """The dims of every field of Inputs and Outputs, e.g. `"b t h d"`; `?` marks an axis that may be 1 (broadcast).

        The first dim of every array is the batch factor `b`, into which `vmap` folds.
        """

    def moving(self, inputs: Any) -> dict[str, Any]:
        """The present inputs that have a gradient, by name."""
        return {name: array for name, array in named(inputs) if name in self.differentiable and has_gradient(array)}

    @abc.abstractmethod
    def output_specs(self, call: Any) -> Any:
        """`Outputs` of `ArraySpec`s: what forward must return for this call; residuals None unless `save_residuals`."""

    @abc.abstractmethod
    def public(self, call: Any) -> tuple[str, ...]:
        """The fields of Outputs that the public function returns, and so have cotangents."""

    @abc.abstractmethod
    def cost(self, call: Any, phase: Phase) -> Cost:
        """Exact work of one phase; masked tiles are not counted."""

    def random_inputs(self, call: Any, rng: np.random.Generator, **given: Any) -> Any:
        """Concrete NumPy inputs of a call, legal for the operation, on which implementations are checked and timed.

        Floats are normal, int8 is of its whole range. An operation with inputs of other types gives them itself.

        Raises:
            NotImplementedError: an input that is not floating is not given.
        """
        values: dict[str, Any] = dict.fromkeys(self.Inputs._fields)  # pyright: ignore[reportAttributeAccessIssue]
        for name in values:
            spec: ArraySpec | None = getattr(call, name)
            if spec is not None:
                values[name] = given[name] if name in given else _normal(self.name, name, spec, rng)
        return self.Inputs(**values)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        """Check concrete values (never tracers) before anything runs, e.g. that cumulative lengths are sorted."""

    def invoke(
        self,
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        platform: _policy.PlatformChoice = None,
        cfg: Any = None,
        form: Callable[..., Bound] | None = None,
    ) -> Any:
        """Run the operation as a public function does.

        Args:
            arrays: keyword arguments of `canonicalise` that hold arrays (any pytree; None where absent).
            options: its other keyword arguments; static and hashable.
            platform: None or "auto", one platform, or several in order of preference.
            cfg: config override for the chosen implementation: its dataclass, a mapping of its fields, or a portable config of
                `ejkernel.modules.operations.configs`, which may also demand a platform.
            form: another door to the same operation with `canonicalise`'s contract.

        Returns:
            What the `Bound` that `form` returned makes of the outputs.
        """
        platform, cfg = _demands(platform, cfg)
        policy = _policy.for_call(self.name, platform)
        for name, value in arrays.items():
            if isinstance(value, list):
                raise wrong_type(name, "list", "an array")
        leaves = jax.tree.leaves(arrays)
        for leaf in leaves:
            if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float)):
                name = next(name for name, value in arrays.items() if any(one is leaf for one in jax.tree.leaves(value)))
                raise wrong_type(name, type(leaf).__name__, "an array")
        target = _target.resolve_target(leaves, policy.target)
        invocation = _Invocation(self, form, _static_options(options), policy, target, cfg)
        if _explain.capturing():
            raise _explain.Captured(invocation.explain(arrays))
        self.check_values(arrays)
        return _invoke(invocation, dict(arrays))

    def run(self, request: Request, inputs: Any) -> Any:
        """Run a canonical request on canonical inputs; differentiable, batchable, partitionable. Returns Outputs."""
        inputs = unify_manual_axes(inputs)
        if not request.policy.custom_gradients:
            return _dispatch.run_forward(request, inputs)
        return _differentiable(request, inputs)

    def __repr__(self) -> str:
        return f"<operation {self.name}>"


@dataclasses.dataclass(frozen=True)
class _Invocation:
    """Everything static about one public call; the key under which its program is cached."""

    operation: Operation
    form: Callable[..., Bound] | None
    options: tuple[tuple[str, Any], ...]
    policy: _policy.Policy
    target: Target
    config: Any

    def bind(self, arrays: Mapping[str, Any]) -> tuple[Bound, Request]:
        bound = (self.form or self.operation.canonicalise)(**arrays, **dict(self.options))
        return bound, Request(self.operation, bound.call, self.target, self.policy, self.config)

    def explain(self, arrays: Mapping[str, Any]) -> _explain.Explanation:
        found: list[Request] = []
        jax.eval_shape(lambda values: found.append(self.bind(values)[1]), dict(arrays))
        return _dispatch.explain_request(found[0])


@functools.partial(jax.jit, static_argnums=0)
def _invoke(invocation: _Invocation, arrays: dict[str, Any]) -> Any:
    bound, request = invocation.bind(arrays)
    return bound.finish(invocation.operation.run(request, bound.inputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(request: Request, inputs: Any) -> Any:
    return _public(request, batched_forward(request, inputs))


def _differentiable_forward(request: Request, inputs: Any) -> Any:
    from jax.ad_checkpoint import checkpoint_name

    outputs = batched_forward(request.saving_residuals(), inputs)
    tagged = {name: checkpoint_name(value, f"{request.operation.name}.{name}") for name, value in named(outputs)}
    outputs = request.operation.Outputs(**{**dict.fromkeys(outputs._fields), **tagged})
    return _public(request, outputs), (inputs, outputs)


def _differentiable_backward(request: Request, residuals: Any, cotangents: Any) -> Any:
    inputs, outputs = residuals
    cotangents = type(cotangents)(*(one if one is not None and has_gradient(one) else None for one in cotangents))
    return (batched_backward(request.saving_residuals(), inputs, outputs, cotangents),)


_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


def _public(request: Request, outputs: Any) -> Any:
    visible = request.operation.public(request.call)
    return type(outputs)(**{name: getattr(outputs, name) if name in visible else None for name in outputs._fields})


def _normal(operation: str, name: str, spec: ArraySpec, rng: np.random.Generator) -> Any:
    dtype = jax.numpy.dtype(spec.dtype)
    if dtype == np.int8:  # quantised numbers
        return rng.integers(-127, 128, spec.shape, np.int8)
    if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
        raise NotImplementedError(f"{operation}: does not say what a random {name} of {spec.dtype} may hold")
    return normal(rng, spec.shape, dtype)


def _static_options(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _static(name, value)) for name, value in options.items())


def _static(name: str, value: Any) -> Any:
    """An option as a hashable Python value: lists become tuples, arrays of one element become numbers."""
    if isinstance(value, jax.core.Tracer):  # pyright: ignore[reportAttributeAccessIssue]
        raise wrong_type(name, "a traced value", "a Python value known when the program is built")
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        if value.size != 1:
            raise wrong_type(name, f"an array of shape {value.shape}", "a Python value")
        return value.item()
    return value


def _demands(platform: _policy.PlatformChoice, cfg: Any) -> tuple[_policy.PlatformChoice, Any]:
    """Platform and config of a call, either of which `cfg=` may say."""
    if cfg is None:
        return platform, None
    from ejkernel.tuning import as_setting, demanded_platform

    return demanded_platform(cfg, platform), as_setting("cfg", cfg)
