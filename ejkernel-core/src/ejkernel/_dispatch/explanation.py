"""`explain`: the decisions for a call that is described and not made."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax

from ejkernel._dispatch.decisions import decide
from ejkernel._dispatch.recording import over_arrays
from ejkernel._plugins.catalog import FUNCTIONS, public_function
from ejkernel.call.decision import Explanation
from ejkernel.call.policy import current_policy, holding
from ejkernel.call.request import Request
from ejkernel.errors import wrong_type
from ejkernel.targets import resolve_target

_capturing = contextvars.ContextVar("ejkernel_explaining", default=False)


class Captured(Exception):  # noqa: N818 - carries an answer, not an error
    """Leaves a public function with the explanation of the call it was about to make."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__("captured")
        self.explanation = explanation


def capturing() -> bool:
    """Whether public functions are being asked what they would do."""
    return _capturing.get()


@contextlib.contextmanager
def capture() -> Generator[None]:
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def explain_request(request: Request) -> Explanation:
    """Both phases of a request, without running it."""
    return Explanation(decide(request, "forward"), decide(request.saving_residuals(), "backward"))


def _call_on_shapes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call a public function with tracers in place of `jax.ShapeDtypeStruct`s, on which it could not compute."""
    call, arrays = over_arrays(function, args, kwargs, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    policy = current_policy()
    if policy.target is None and any(array.sharding is not None for array in arrays):
        leaves = jax.tree.leaves((args, kwargs))  # tracers do not say on which devices they are
        policy = dataclasses.replace(policy, target=resolve_target(leaves))
    with holding(policy):
        jax.eval_shape(call, arrays)


def explain(operation: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which implementation would run a call, and why not the others. Nothing is computed.

    Args:
        operation: a public function or its name, e.g. `"flash_attention"` or `"flash_attn_varlen"`.
        *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
        **kwargs: its keyword arguments.

    Returns:
        The dispatcher's decision for both phases.

    Raises:
        ValueError: unknown operation, or whatever the call itself would refuse.
        TypeError: likewise, or an operation that is neither.
    """
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", "")
    if name is not operation and (name not in FUNCTIONS or public_function(name) is not operation):
        raise wrong_type("operation", repr(operation), "a public function or its name, such as 'rms_norm'")
    function = public_function(name)
    with capture():
        try:
            _call_on_shapes(function, args, kwargs)
        except Captured as captured:
            return captured.explanation
    raise ValueError(f"explain: {name!r} does not dispatch to an operation")
