"""A made-up implementation of `rms_norm` and made-up peers of it, and limits that nobody measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_bench as bench
from ejkernel import kernel_registry
from ejkernel.operations.rms_norm.interface import RmsNormInputs, RmsNormOutputs
from ejkernel_bench import _run, peers
from ejkernel_bench.peers import Peer


def textbook(call: Any, x: Any, scale: Any) -> Any:
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + call.epsilon)
    return normal if scale is None else normal * (scale[:, None] + call.scale_offset)


def _busy(x: Any) -> Any:
    """A zero that the compiler cannot leave out and that takes longer to compute than a busy machine may interrupt a process."""
    side = jnp.full((96, 96), 0.1) + 0 * jnp.sum(x)
    return 0 * jax.lax.fori_loop(0, 1000, lambda _, a: jnp.tanh(a @ a), side)[0, 0]


def slow_forward(call: Any, inputs: Any, config: Any) -> RmsNormOutputs:
    rstd = jax.lax.rsqrt(jnp.mean(inputs.x**2, -1) + call.epsilon) if call.save_residuals else None
    return RmsNormOutputs(textbook(call, inputs.x, inputs.scale) + _busy(inputs.x), rstd)


def slow_backward(call: Any, inputs: Any, outputs: Any, cotangents: Any, config: Any) -> RmsNormInputs:
    _, pull = jax.vjp(lambda x, scale: textbook(call, x, scale), inputs.x, inputs.scale)
    x, scale = pull(cotangents.out)
    return RmsNormInputs(x + _busy(x), scale)


def refusing(call: Any, target: Any) -> str:
    return "needs a moon"


def fake(name: str, factor: float = 1.0, fails: str = "", refuses: str = "") -> Peer:
    """A peer whose answer is `factor` times the right one."""

    def build(call: Any, inputs: Any) -> Any:
        if refuses:
            return refuses

        def norm(inputs: Any) -> Mapping[str, Any]:
            if fails:
                raise RuntimeError(fails)
            return {"out": factor * textbook(call, inputs.x, inputs.scale)}

        return norm

    return Peer(name, {"rms_norm": build})


FAKES = (
    fake("quick"),
    fake("wrong", factor=1.01),
    fake("raising", fails="out of registers\nand more"),
    fake("choosy", refuses="does not do scale"),
    Peer("absent", {"rms_norm": lambda call, inputs: "never asked"}, modules=("no_such_package",)),
    Peer("elsewhere", {"rms_norm": lambda call, inputs: "never asked"}, backends=("gpu",)),
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`slow` is what dispatch chooses, `moon` refuses; the peers are `FAKES`."""
    register: Callable[..., Any] = kernel_registry.register
    register("rms_norm", "slow", phase="forward", priority=2000)(slow_forward)
    register("rms_norm", "slow", phase="backward", priority=2000)(slow_backward)
    register("rms_norm", "moon", phase="forward", priority=3000, supports=refusing)(slow_forward)
    for module in (peers, peers._find):
        monkeypatch.setattr(module, "known_peers", lambda: FAKES)
    limits = {"flops_per_s": dict.fromkeys(("float32", "bfloat16"), 1e9), "bytes_per_s": 1e9, "how": "made up"}
    monkeypatch.setattr(_run, "measure_limits", lambda dtypes, backend: limits)
    yield
    for platform, phase in (("slow", "forward"), ("slow", "backward"), ("moon", "forward")):
        kernel_registry.unregister("rms_norm", platform, phase=phase)


@pytest.fixture
def benchmark(world: None) -> Callable[..., dict[str, Any]]:
    """Run the small cases of `rms_norm` that match."""

    def run(case: str = "scale", each: Any = None, save: Any = None, **settings: Any) -> dict[str, Any]:
        settings = {"operations": ("rms_norm",), "size": "test", "rounds": 5, "input_sets": 2, **settings}
        return bench.run(bench.Settings(case=case, **settings), progress=False, each=each, save=save)

    return run
