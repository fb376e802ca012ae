"""A GPU host that has core and Triton's kernels alone: which public functions run there, and which of their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from public_calls import CALLS, FROM_HIDDEN, PublicCall

import ejkernel
from ejkernel.errors import NoKernelError
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton._versions import version_problem

pytestmark = [
    pytest.mark.skipif(version_problem() is not None, reason=f"install jax-triton: {version_problem()}"),
    pytest.mark.skipif(
        "triton" not in ejkernel.kernel_registry.list_platforms("rms_norm"),
        reason="EJKERNEL_PLUGINS leaves Triton out: name it",
    ),
]

OTHERS = ("xla", "pallas", "cuda")
EVERY = {**CALLS, **FROM_HIDDEN}


def zeros(kernel: Any, inputs: Any, outputs: Any, **options: Any) -> list[Any]:
    """In place of a launch: which kernels run is asked here, not whether they compile."""
    return [jnp.zeros(shape, dtype) for shape, dtype in outputs]


def total(call: PublicCall, arrays: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in jax.tree.leaves(call.run(arrays)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves)


def lowered(call: PublicCall, phase: str) -> None:
    """The whole call, or all of its gradients, for a GPU that need not be here."""
    arrays = call.in_dtype("bfloat16")
    differentiated = {name: arrays.pop(name) for name in call.floating}

    def loss(differentiated: dict[str, Any], arrays: dict[str, Any]) -> Any:
        return total(call, {**arrays, **differentiated})

    program = jax.jit(jax.grad(loss) if phase == "gradient" else loss)
    with ejkernel.use(forbid=OTHERS, target="gpu:9.0"), intercept_launches(zeros):
        program.trace(differentiated, arrays).lower(lowering_platforms=("cuda",))


def missing(call: PublicCall) -> tuple[str, str] | None:
    """What does not run, the first that does not, and the phase that has no kernel."""
    for phase in ("forward", "gradient") if call.floating else ("forward",):
        try:
            lowered(call, phase)
        except NoKernelError as error:
            return phase, str(error).partition(" on gpu")[0]
    return None


@pytest.mark.unsampled
@pytest.mark.parametrize("name", EVERY)
def test_runs_and_differentiates(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # a program of several devices forms no gradients early
    assert missing(EVERY[name]) is None
