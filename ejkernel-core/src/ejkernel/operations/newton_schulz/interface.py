"""Contract of `newton_schulz`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, finite_number, integer, result_dtype
from ejkernel.utils.tracing import without_gradient

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan et al., Muon, 2024: the steepest at 0 of those that bring singular values near 1."""
STEPS = 5
PRODUCTS = ("bfloat16", "float32")
"""Dtypes of the operands of products."""

Step = tuple[float, float, float]


class NewtonSchulzInputs(NamedTuple):
    """x `[b, m, n]`, m <= n."""

    x: Float[Array, "b m n"]


class NewtonSchulzOutputs(NamedTuple):
    """out `[b, m, n]` in the dtype of x. There is no residual."""

    out: Float[Array, "b m n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewtonSchulzCall(Call):
    """Static facts: (a, b, c) of every step, and the dtype of the operands of products."""

    x: ArraySpec
    coefficients: tuple[Step, ...] = (COEFFICIENTS,) * STEPS
    eps: float = 1e-7
    dtype: str = "bfloat16"

    @property
    def tolerated_as(self) -> str | None:
        """Steps in bfloat16 deviate more than their result is rounded; those in float32 no less than in float32."""
        if self.dtype == "bfloat16":
            return "iterated bfloat16"
        return "float32" if self.x.dtype == "float64" else None


class NewtonSchulz(Operation):
    """`X = x / (|x| + eps)` by the Frobenius norm; each step `A = X X'`, `B = b A + c A A`, `X = a X + B X`.

    X, A and B are rounded to `dtype` once they are summed, in float32.
    """

    name = "newton_schulz"
    Call = NewtonSchulzCall
    Inputs = NewtonSchulzInputs
    Outputs = NewtonSchulzOutputs
    revisions = (3,)
    differentiable = ()

    def canonicalise(
        self, x: Any, *, steps: int | None = None, coefficients: Any = COEFFICIENTS, eps: float = 1e-7, dtype: Any = "bfloat16"
    ) -> Bound:
        """Check, add or merge batch axes, and transpose tall matrices. Arguments as in `ejkernel.newton_schulz`."""
        check_compute("x", x)
        if x.ndim < 2:
            raise invalid("x", f"shape {tuple(x.shape)}", "[..., M, N]")
        name = result_dtype("dtype", dtype)
        if name not in PRODUCTS:
            raise invalid("dtype", name, " or ".join(PRODUCTS))
        shape, tall = tuple(x.shape), x.shape[-2] > x.shape[-1]
        flat = without_gradient("x", x)
        flat = flat if x.ndim == 3 else flat.reshape(math.prod(shape[:-2]), *shape[-2:])
        inputs = NewtonSchulzInputs(jnp.swapaxes(flat, 1, 2) if tall else flat)
        call = NewtonSchulzCall(
            x=ArraySpec.of(inputs.x),
            coefficients=_steps(steps, coefficients),
            eps=finite_number("eps", eps, at_least=0),
            dtype=name,
        )

        def finish(outputs: NewtonSchulzOutputs) -> Any:
            out = jnp.swapaxes(outputs.out, 1, 2) if tall else outputs.out
            return out if len(shape) == 3 else out.reshape(shape)

        return Bound(call, inputs, finish)

    def dimensions(self, call: NewtonSchulzCall) -> Mapping[str, str]:
        return {"x": "b m n", "out": "b m n"}

    def output_specs(self, call: NewtonSchulzCall) -> NewtonSchulzOutputs:
        return NewtonSchulzOutputs(call.x)

    def public(self, call: NewtonSchulzCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: NewtonSchulzCall, phase: Phase) -> Cost:
        """Of three general products a step; the symmetric two can be had for half."""
        batch, rows, columns = call.x.shape
        return Cost(len(call.coefficients) * 2 * batch * rows * rows * (2 * columns + rows), 2 * call.x.nbytes)


def _steps(steps: Any, coefficients: Any) -> tuple[Step, ...]:
    """(a, b, c) of every step."""
    if not isinstance(coefficients, (tuple, list)):
        raise wrong_type("coefficients", type(coefficients).__name__, "a tuple (a, b, c), or one for each step")
    given = cast("Sequence[Any]", coefficients)
    each = all(isinstance(one, (tuple, list)) for one in given)
    rows: list[Sequence[Any]] = list(given) if each else [given]
    for row in rows:
        if len(row) != 3:
            raise invalid("coefficients", repr(coefficients), "three numbers (a, b, c), or three for each step")
    found = [cast("Step", tuple(finite_number("coefficients", value) for value in row)) for row in rows]
    if not each:
        return tuple(found) * (STEPS if steps is None else integer("steps", steps, 0))
    if steps is not None and integer("steps", steps, 0) != len(found):
        raise invalid("steps", steps, f"{len(found)}, as many as coefficients has, or None")
    return tuple(found)


OPERATION = NewtonSchulz()
