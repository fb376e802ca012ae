"""`moe_route`, `moe_permute`, `moe_unpermute` in Triton without a GPU: numbers in the interpreter, machine code, lowering."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.call.arrays import named
from ejkernel.operations import get_operation, operation_module
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.testing.shapes import bound_shapes
from ejkernel_triton._versions import version_problem

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import _ahead_of_time as aot, testing
from ejkernel_triton._copies import capability as copies_capability, config as copies_config, kernel as copies
from ejkernel_triton.moe_permute import capability as permute_capability, config as permute_config, kernel as permute
from ejkernel_triton.moe_route import capability as route_capability, config as route_config, kernel as route
from ejkernel_triton.moe_unpermute import kernel as unpermute

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
OPERATIONS = ("moe_permute", "moe_route", "moe_unpermute")


def check(operation, inputs, module, forward, backward, **options):
    """Both phases of canonical inputs against the float64 reference."""
    owner = get_operation(operation)
    call = owner.Call(**{name: ArraySpec.of(value) for name, value in named(inputs)}, **options)
    reference = operation_module(operation, "reference")
    got, exact = module.forward(call, inputs, forward), reference.forward(call, widened(inputs))
    for (name, value), spec in zip(named(got), owner.output_specs(call), strict=True):
        np.testing.assert_allclose(np.asarray(value, np.float64), getattr(exact, name), atol=2e-6, rtol=2e-6, err_msg=name)
        assert ArraySpec.of(value) == spec
    rng = np.random.default_rng(1)
    drawn = [
        jnp.asarray(rng.standard_normal(value.shape), value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else None
        for value in got
    ]
    cotangents = owner.Outputs(*drawn)
    found = module.backward(call, inputs, got, cotangents, backward)
    expected = reference.backward(call, widened(inputs), exact, widened(cotangents))
    for name, value in named(found):
        np.testing.assert_allclose(value, getattr(expected, name), atol=1e-5, rtol=1e-5, err_msg=name)
    return got


@pytest.mark.parametrize("chunk", [16, 32, 256])
@needs_jax_triton
def test_positions_over_several_chunks(interpreted, chunk):
    """Every chunk places its copies behind those of the chunks before it, as do those of no group."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 41, 12)), jnp.float32)
    experts = jnp.asarray(rng.integers(-2, 9, (2, 41, 3)), jnp.int32)
    inputs = get_operation("moe_permute").Inputs(x, experts)
    config = permute_config.ForwardConfig(8, 1, chunk)
    check("moe_permute", inputs, permute, config, copies_config.Config(4, 1), num_experts=7)


@pytest.mark.parametrize("block", [4, 16])
@needs_jax_triton
def test_members_may_share_positions_and_weights(interpreted, block):
    """What vmap over one of them folds to."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 20, 11))
    rows[:, 14:] = np.nan
    positions = rng.permutation(20).reshape(1, 10, 2)
    positions = np.where(positions < 14, positions, ~positions)
    weights = np.where(positions < 0, np.nan, rng.random(positions.shape))
    for shared_positions, shared_weights in ((True, True), (True, False), (False, True)):
        inputs = get_operation("moe_unpermute").Inputs(
            jnp.asarray(rows, jnp.float32),
            jnp.asarray(positions if shared_positions else np.tile(positions, (3, 1, 1)), jnp.int32),
            jnp.asarray(weights if shared_weights else np.tile(weights, (3, 1, 1)), jnp.float32),
        )
        check("moe_unpermute", inputs, unpermute, copies_config.Config(block, 1), copies_config.Config(block, 1))


@pytest.mark.parametrize("tokens", [1, 4, 32])
@needs_jax_triton
def test_members_may_have_their_own_bias(interpreted, tokens):
    rng = np.random.default_rng(0)
    logits, bias = rng.standard_normal((3, 5, 12)), rng.standard_normal((3, 12))
    logits[0, 0, :9], logits[1, 1] = -np.inf, -np.inf
    inputs = get_operation("moe_route").Inputs(jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32))
    config = route_config.Config(tokens, 1)
    for options in (
        {"k": 3, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
        {"k": 4, "scoring": "softmax", "num_groups": 3, "top_groups": 2, "normalize": False},
    ):
        check("moe_route", inputs, route, config, config, **options)


@needs_jax_triton
def test_positions_out_of_range_write_nothing(interpreted):
    """Memory outside of the rows stays as it is; the interpreter guards it."""
    x = jnp.ones((1, 3, 4))
    positions = jnp.array([[[0, 6], [1, ~7], [2, 9]]], jnp.int32)
    out = copies.spread(x, positions, None, copies_config.Config(4, 1))
    np.testing.assert_array_equal(out[0, :3], 1)
    np.testing.assert_array_equal(copies.collect(x.repeat(2, 1), positions, None, copies_config.Config(4, 1)), x)


@pytest.mark.parametrize("operation", OPERATIONS)
@needs_jax_triton
def test_search_spaces_are_small_and_hold_the_heuristic(operation):
    found = importlib.import_module(f"ejkernel_triton.{operation}.config")
    for case in operation_module(operation, "cases").CASES:
        call = bound_shapes(operation, case, "bfloat16")[1]
        for space in (found.FORWARD, found.BACKWARD):
            configs = space.search_space(call, H200)
            assert space.heuristic(call, H200) in configs
            assert len(configs) == len({*configs}) <= 12


@pytest.mark.parametrize("capability", [80, 90, 100])
@needs_jax_triton
def test_compiles_without_spills(monkeypatch, triton_cache, capability):
    monkeypatch.delenv("EJKERNEL_TRITON_INTERPRET", raising=False)
    for operation in OPERATIONS:
        cases = operation_module(operation, "cases").CASES
        case = next(case for case in cases if case.name.startswith("bench-t16384"))
        rows = list(aot.compiled(operation, [case], ("bfloat16",), (capability,)))
        assert rows and all(row.stack <= testing.tolerated_stack() for row in rows), rows
        assert max(row.registers for row in rows) <= 168, [(row.kernel, row.registers) for row in rows]


@needs_jax_triton
def test_lowers_for_cuda():
    def loss(x, logits):
        weights, experts = ejkernel.moe_route(logits, 2, platform="triton")
        rows, _, positions = ejkernel.moe_permute(x, experts, 8, platform="triton")
        return ejkernel.moe_unpermute(rows, positions, weights, platform="triton").astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((64, 32), "bfloat16"), jax.ShapeDtypeStruct((64, 8), "float32")]
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert all(f"ejkernel.{operation}.backward[triton]" in text for operation in OPERATIONS)
    assert "stablehlo.scatter" not in text and "stablehlo.sort" not in text


@needs_jax_triton
def test_supports():
    call = get_operation("moe_route").canonicalise(np.ones((4, 16), np.float32), k=2).call
    assert route_capability.supports_forward(call, H200) is None
    assert "the target is cpu" in str(route_capability.supports_forward(call, Target("cpu")))
    many = dataclasses.replace(call, logits=ArraySpec((1, 4, 2048), "float32"))
    assert "2048 experts are more than 1024" in str(route_capability.supports_forward(many, H200))
    groups = dataclasses.replace(call, logits=ArraySpec((1, 4, 128), "float32"), num_groups=64, top_groups=2)
    assert "64 groups are more than 32" in str(route_capability.supports_forward(groups, H200))
    moved = (
        get_operation("moe_permute").canonicalise(np.ones((4, 8), np.float32), np.ones((4, 2), np.int32), num_experts=8).call
    )
    assert permute_capability.supports_forward(moved, H200) is None
    wide_choice = dataclasses.replace(moved, experts=ArraySpec((1, 4, 33), "int32"))
    assert "33 experts of a token" in str(permute_capability.supports_backward(wide_choice, H200))
    assert copies_capability.MAX_CHOICES == 32
    in_float64 = dataclasses.replace(moved, x=ArraySpec((1, 4, 8), "float64"))
    assert "x is float64" in str(permute_capability.supports_forward(in_float64, H200))
