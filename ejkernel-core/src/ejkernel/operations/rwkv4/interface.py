"""Contract of `rwkv4`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named, statistics_dtype
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import wrong_type
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_compute, check_shape

NOTHING_SEEN = -1e30
"""The exponent of a state that has seen no token: finite, so that its distance to any other is; `exp` of it is 0."""


class Rwkv4Inputs(NamedTuple):
    """w, u `[1 or b, c]`; k, v `[b, t, c]`; state `[b, 3, c]`: numerator, denominator, exponent."""

    w: Float[Array, "#b c"]
    u: Float[Array, "#b c"]
    k: Float[Array, "b t c"]
    v: Float[Array, "b t c"]
    state: Float[Array, "b 3 c"] = None


class Rwkv4Outputs(NamedTuple):
    """out `[b, t, c]` in the dtype of v; final_state `[b, 3, c]`, float32 (float64 for float64), with return_state. There is no
    residual."""

    out: Float[Array, "b t c"]
    final_state: Float[Array, "b 3 c"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rwkv4Call(Call):
    """Static facts of one `rwkv4`.

    Attributes:
        return_state: final_state is wanted.
    """

    w: ArraySpec
    u: ArraySpec
    k: ArraySpec
    v: ArraySpec
    state: ArraySpec | None = None
    return_state: bool = False


class Rwkv4(Operation):
    """`out_t = (e^p a + e^(u + k_t) v_t) / (e^p b + e^(u + k_t))` with the state (a, b, p) of the tokens before t, where
    `e^p a = sum_s e^(k_s - (t - 1 - s) e^w) v_s`, b is the same sum without v, and p a running maximum:
    `p_t = max(p_(t-1) - e^w, k_t)`, the first of the two if they are equal.

    A state is differentiated as the three numbers that it is: a gradient of numerator or denominator reaches the keys through
    the exponent too.
    """

    name = "rwkv4"
    Call = Rwkv4Call
    Inputs = Rwkv4Inputs
    Outputs = Rwkv4Outputs
    revisions = (2,)
    differentiable = ("w", "u", "k", "v", "state")
    shardable = ("b", "c")

    def canonicalise(self, w: Any, u: Any, k: Any, v: Any, state: Any = None, *, return_state: bool = False) -> Bound:
        """Check. Arguments as in `ejkernel.rwkv4`."""
        if not isinstance(return_state, bool):
            raise wrong_type("return_state", repr(return_state), "a bool")
        check_compute("k", k, ndim=3)
        batch, _, channels = k.shape
        expected = {"w": (w, (channels,), "[C]"), "u": (u, (channels,), "[C]"), "v": (v, k.shape, "[B, T, C] as k")}
        if state is not None:
            expected["state"] = (state, (batch, 3, channels), "[B, 3, C]")
        for name, (array, shape, meaning) in expected.items():
            check_compute(name, array)
            check_shape(name, array, shape, meaning)
        inputs = Rwkv4Inputs(w[None], u[None], k, v, state)
        specs: dict[str, Any] = {name: ArraySpec.of(array) for name, array in named(inputs)}
        call = Rwkv4Call(**specs, return_state=return_state)

        def finish(outputs: Rwkv4Outputs) -> Any:
            return (outputs.out, outputs.final_state) if return_state else outputs.out

        return Bound(call, inputs, finish)

    def random_inputs(self, call: Rwkv4Call, rng: np.random.Generator, **given: Any) -> Rwkv4Inputs:
        """Decays below 0; a state with a denominator above it."""
        known: dict[str, Any] = {"w": -rng.random(call.w.shape, np.float32).astype(jnp.dtype(call.w.dtype))}
        if call.state is not None:
            known["state"] = rng.random(call.state.shape, np.float32).astype(jnp.dtype(call.state.dtype))
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: Rwkv4Call) -> Mapping[str, str]:
        return {
            "w": "b? c",
            "u": "b? c",
            "k": "b t c",
            "v": "b t c",
            "state": "b s c",
            "out": "b t c",
            "final_state": "b s c",
        }

    def time(self, call: Rwkv4Call) -> Mapping[str, int]:
        return {"t": 0}

    def output_specs(self, call: Rwkv4Call) -> Rwkv4Outputs:
        batch, _, channels = call.v.shape
        state = ArraySpec((batch, 3, channels), statistics_dtype(call.v.dtype))
        return Rwkv4Outputs(call.v, state if call.return_state else None)

    def public(self, call: Rwkv4Call) -> tuple[str, ...]:
        return ("out", "final_state") if call.return_state else ("out",)

    def cost(self, call: Rwkv4Call, phase: Phase) -> Cost:
        """Four exponentials and sixteen other operations per token and channel; the gradient forms the states again."""
        read = sum(spec.nbytes for spec in vars(call).values() if isinstance(spec, ArraySpec))
        flops = 20 * call.k.size
        if phase == "forward":
            return Cost(flops, read + call.v.nbytes)
        return Cost(3 * flops, 2 * read + call.v.nbytes)


OPERATION = Rwkv4()
