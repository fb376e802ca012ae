"""`qk_norm_rope` in Triton without a GPU: cases are the conformance suite's; here, tiles of all shapes and machine code."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.operations.qk_norm_rope.cases import CASES
from ejkernel.operations.qk_norm_rope.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel_triton.qk_norm_rope import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from both_phases import check_phases

from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.qk_norm_rope import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
NAMED = {case.name: case for case in CASES}
CHOICES = (
    (config.ForwardConfig(1, 1, 1), config.BackwardConfig(1, 1, 1, 3, 1)),
    (config.ForwardConfig(4, 2, 1), config.BackwardConfig(4, 2, 1, 5, 2)),
    (config.ForwardConfig(8, 8, 1), config.BackwardConfig(2, 8, 1, 1000, 1)),
)


def problem(case, **parameters):
    bound = OPERATION.canonicalise(**case.arrays(np.random.default_rng(0)), **case.options)
    inputs = jax.tree.map(jnp.asarray, bound.inputs._replace(**parameters))
    specs = {name: ArraySpec.of(value) for name, value in parameters.items()}
    return dataclasses.replace(bound.call, save_residuals=True, **specs), inputs


@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("name", ["gqa", "partial-interleaved", "partial", "heads-first", "no-rotation", "odd-pairs"])
def test_tiles_of_all_shapes(interpreted, name, choices):
    check_phases(OPERATION, kernel, *problem(NAMED[name]), choices)


@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("name", ["gqa", "heads-first", "partial"])
def test_a_scale_of_each_member_of_the_batch(interpreted, name, choices):
    width = np.shape(NAMED[name].arrays(np.random.default_rng(0))["query"])[-1]
    scale = jnp.asarray(np.random.default_rng(2).standard_normal((2, width)), jnp.float32)
    check_phases(OPERATION, kernel, *problem(NAMED[name], query_scale=scale), choices)


def test_search_spaces_are_small():
    for name, target in itertools.product(NAMED, (H200, Target("gpu", "", "8.9"), Target("cpu"))):
        call, _ = problem(NAMED["gqa" if "bench" in name else name])
        for space in (config.FORWARD, config.BACKWARD):
            found = space.search_space(call, target)
            assert space.heuristic(call, target) in found
            assert len(found) == len(set(found)) <= 40, (name, target, len(found))


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", ["bench-b4-t8192-h32-k8-d128", "partial", "interleaved"])
def test_machine_code(triton_cache, name, sm):
    launches = [launch for _, launch in recorded("qk_norm_rope", NAMED[name], "bfloat16", target_of(sm))]
    wanted = {"qk_norm_rope_kernel", "qk_norm_rope_backward_kernel", "rope_angle_gradients_kernel"}
    assert {launch.kernel.fn.__name__ for launch in launches} == wanted
    for launch in {launch.identity: launch for launch in launches}.values():
        compiled = launch.compile(sm)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack(), launch.constants
        if name.startswith("bench"):
            wide = ("ld.global.v4.b32", "cp.async.cg.shared.global")
            assert any(load in compiled.asm["ptx"] for load in wide), "loads are not 16 bytes wide"


def test_what_is_refused():
    call, _ = problem(NAMED["gqa"])
    assert capability.supports_forward(call, H200) is None

    def ask(**shapes):
        specs = {name: dataclasses.replace(getattr(call, name), shape=shape) for name, shape in shapes.items()}
        return capability.supports_backward(dataclasses.replace(call, **specs), H200) or ""

    assert "head size 8192" in ask(query=(1, 2, 3, 8192), key=(1, 2, 3, 8192))
    assert "has no heads" in ask(key=(2, 33, 0, 16))
    assert "heads are more than" in ask(query=(4096, 2**16, 8, 16), key=(4096, 2**16, 8, 16))
