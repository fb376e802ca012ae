"""Gradients of `linear_recurrence` that are sums over time, in Triton's interpreter, where terms cancel or overflow."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.linear_recurrence import reference
from ejkernel.operations.linear_recurrence.cases import arrays
from ejkernel.operations.linear_recurrence.interface import OPERATION, LinearRecurrenceOutputs
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import GRADIENT, Tolerance, check_close

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.linear_recurrence import config, decays, kernel, launches
from ejkernel_triton.linear_recurrence.params import as_computed

H200 = Target("gpu", "NVIDIA H200", "9.0")
LIMIT = Tolerance(8e-6, 2e-5)
"""Below what any platform is held to: the interpreter has seen the errors of the products, and no others."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for module in (decays, launches):
        monkeypatch.setattr(module, "call_kernel", testing.interpreted_call)


def problem(maker, dtype, seed, options=None):
    """A call, its inputs and cotangents."""
    rng = np.random.default_rng(seed)
    made = {name: jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for name, x in maker(rng).items()}
    bound = OPERATION.canonicalise(**made, **(options or {}))
    specs = OPERATION.output_specs(bound.call)
    cotangents = [None if spec is None else jnp.asarray(rng.standard_normal(spec.shape), spec.dtype) for spec in specs]
    return bound.call, bound.inputs, LinearRecurrenceOutputs(*cotangents)


def exact_gradients(call, inputs, cotangents):
    outputs = reference.forward(call, widened(inputs))
    return reference.backward(call, widened(inputs), outputs, widened(cotangents))


@pytest.mark.parametrize(
    ("decays", "rate", "more", "choice"),
    [
        ("gamma", 2.0, {}, None),
        ("gamma", 6.0, {}, config.Config(64, 64, 128, 8, 1)),
        ("gamma", 2.0, {"bounds": (0, 30, 63)}, None),
        ("g gamma", 2.0, {"query_heads": 16}, config.Config(64, 64, 128, 8, 1)),
        ("gk gamma", 2.0, {}, None),
        ("gk gamma", 6.0, {}, None),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_strong_decays_in_float32(decays, rate, more, choice, reverse):
    """Products of three TF32 ones differ by more than what strong decays leave of pairs of tokens. Several heads, so that no sum is
    small by chance."""
    for seed in range(2):
        maker = arrays(1, 65, 8, 16, 16, decays=decays, rate=rate, **more)
        call, inputs, cotangents = problem(maker, "float32", seed, {"reverse": reverse})
        found = kernel.backward(call, inputs, None, cotangents, choice or config.backward_heuristic(call, H200))
        wanted = exact_gradients(call, inputs, cotangents)
        for name in ("g", "gk", "g_gamma"):
            if getattr(found, name) is not None:
                check_close(f"{name}, seed {seed}", getattr(found, name), getattr(wanted, name), LIMIT)


FACTORS = {"value_scale": True, "skip": "head"}


@pytest.mark.parametrize(
    ("decays", "more", "segment", "block"),
    [
        ("g", {}, 0, 16),
        ("g", {"state": True}, 16, 16),
        ("", {}, 0, 16),
        ("", {}, 16, 16),
        ("g gamma", {}, 0, 128),
        ("", {}, 0, 128),
        ("gk", {}, 0, 16),
        ("gk", {"bonus": True}, 16, 16),
    ],
)
def test_values_times_factors_may_exceed_float16(decays, more, segment, block):
    """Only outputs, states and gradients need to be in its range."""
    maker = arrays(1, 40, 2, 8, 8, decays=decays, **FACTORS, **more)
    call, inputs, cotangents = problem(maker, "float16", 0, {"return_state": True})
    inputs = inputs._replace(
        query=inputs.query / 32, key=inputs.key / 32, value=inputs.value * 100, value_scale=inputs.value_scale * 1000
    )
    choice = config.Config(16, segment, block, 8 if block == 128 else 4, 1)
    out = kernel.forward(call, inputs, choice)
    exact = reference.forward(call, widened(inputs))
    assert np.abs(np.asarray(inputs.value, np.float32)).max() * np.abs(np.asarray(inputs.value_scale)).max() > 1e5
    for name, value in zip(out._fields, out, strict=True):
        check_close(name, value, getattr(exact, name), GRADIENT["float16"])
    cotangents = jax.tree.map(lambda x: x * jnp.asarray(1e-2, x.dtype), cotangents)
    found = kernel.backward(call, inputs, out, cotangents, dataclasses.replace(choice, segment_size=segment or 16))
    wanted = exact_gradients(call, inputs, cotangents)
    for name, value in found._asdict().items():
        if value is not None:
            assert value.dtype == getattr(inputs, name).dtype
            check_close(f"gradient of {name}", value, getattr(wanted, name), GRADIENT["float16"])


def test_what_runs_in_float32_has_configs_for_it():
    wide, narrow = (
        problem(arrays(1, 600, 2, 64, 64, decays="g", value_scale=True), dtype, 0)[0] for dtype in ("float32", "float16")
    )
    assert as_computed(narrow, backward=True).query.dtype == "float32" and as_computed(narrow, backward=False) is narrow
    assert config.backward_heuristic(narrow, H200) == config.backward_heuristic(wide, H200)
    assert config.forward_heuristic(narrow, H200) != config.forward_heuristic(wide, H200)
