"""`native_sparse_selection` in Triton on a machine without a GPU: what is chosen, machine code, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.native_sparse_selection import reference
from ejkernel.operations.native_sparse_selection.cases import CASES
from ejkernel.operations.native_sparse_selection.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._versions import version_problem
from ejkernel_triton.native_sparse_selection import capability, config
from ejkernel_triton.native_sparse_selection.config import Config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.native_sparse_selection import kernel

H100 = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"compilation: {version_problem()}")
TILE = Config(block_q=16, block_n=16, num_warps=4, num_stages=2)
SMALL = {case.name: case for case in CASES if not case.is_benchmark}


def bound_of(case, dtype="float32"):
    made = case.arrays(np.random.default_rng(3))
    arrays = {name: jnp.asarray(array, dtype if array.dtype == np.float32 else None) for name, array in made.items()}
    return OPERATION.canonicalise(**arrays, **case.options)


def check(bound, chosen=TILE):
    with intercept_launches(testing.traced_call):
        got = kernel.forward(bound.call, bound.inputs, chosen).blocks
    assert got.dtype == jnp.int32
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, reference.forward(bound.call, widened(bound.inputs)).blocks)


@pytest.mark.parametrize("name", SMALL)
def test_choices_in_the_interpreter(name):
    check(bound_of(SMALL[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chosen", [TILE, dataclasses.replace(TILE, block_q=32, block_n=32, per_thread=1)])
def test_choices_of_halves(dtype, chosen):
    check(bound_of(SMALL["groups"], dtype), chosen)
    check(bound_of(SMALL["ties"], dtype), chosen)


@pytest.mark.parametrize("name", ["groups", "decoding", "packed-counted"])
def test_some_queries_at_a_time(monkeypatch, name):
    """Scores of 16 queries are held."""
    monkeypatch.setattr(kernel, "_NUMBERS", 1)
    check(bound_of(SMALL[name]))


def test_blocks_that_all_are_selected_are_not_scored():
    recorder = testing.Recorder()
    call, inputs = shapes_of(64, 16, 64, 4, 128)
    with intercept_launches(recorder):
        jax.eval_shape(lambda inputs: kernel.forward(call, inputs, TILE), inputs)
    assert [one.kernel.fn.__name__ for one in recorder.compilations] == ["select_blocks_kernel"]


def shapes_of(queries, entries, heads, key_heads, size, *, batch=1, dtype="bfloat16", count=16, packed=False):
    """A call of the shapes of a model; no arrays."""

    def make():
        rows = jnp.zeros((1 if packed else batch, queries), jnp.int32)
        found.append(
            OPERATION.canonicalise(
                jnp.zeros((batch, queries, heads, size), dtype), jnp.zeros((batch, entries, key_heads, size), dtype),
                jnp.zeros((batch, queries, heads)), rows, rows if packed else None, count=count,
            )
        )  # fmt: skip
        return found[0].inputs

    found = []
    inputs = jax.eval_shape(make)
    return found[0].call, inputs


MACHINE = {
    "training": (shapes_of(8192, 128, 64, 4, 128), 8),
    "long": (shapes_of(32768, 512, 64, 4, 128, packed=True), 8),
    "decoding": (shapes_of(1, 1024, 64, 4, 128, batch=64), 5),
    "wide": (shapes_of(4096, 256, 16, 16, 256, dtype="float16"), 4),
    "float32": (shapes_of(4096, 64, 32, 4, 64, dtype="float32"), 3),
}


@needs_jax_triton
@pytest.mark.parametrize("capability_number", [80, 90])
@pytest.mark.parametrize("name", MACHINE)
def test_every_config_fits(triton_cache, name, capability_number):
    """And products run on tensor cores, without spills in loops, on Hopper without any."""
    target = Target("gpu", "", f"{capability_number // 10}.0")
    (call, inputs), least = MACHINE[name]
    space = config.search_space(call, target)
    assert space[0] == config.heuristic(call, target) and least <= len(space) <= 12
    for chosen in space:
        recorder = testing.Recorder()
        with intercept_launches(recorder):
            jax.eval_shape(lambda inputs, chosen=chosen: kernel.forward(call, inputs, chosen), inputs)
        for compilation in {one.identity: one for one in recorder.compilations}.values():
            machine = compilation.compile(capability_number)
            used = testing.resources(machine)
            assert machine.metadata.shared <= shared_memory_limit(target), chosen
            assert used.spilling == 0, (compilation.kernel, chosen)
            assert not used.stack or capability_number == 80, (compilation.kernel, chosen)
            if compilation.kernel is kernel.block_scores_kernel and name != "float32":
                assert "mma" in machine.asm["ptx"]


@needs_jax_triton
@pytest.mark.parametrize("entries", [1, 17])
def test_sizes_of_one_compile(triton_cache, entries):
    """Triton makes constants of integers that are 1."""
    call, inputs = shapes_of(1, entries, 1, 1, 1, count=1)
    recorder = testing.Recorder()
    with intercept_launches(recorder):
        jax.eval_shape(lambda inputs: kernel.forward(call, inputs, TILE), inputs)
    for compilation in recorder.compilations:
        assert compilation.compile(90).asm["cubin"]


@needs_jax_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"size": 257}, "the query's head size 257 is above 256"),
        ({"entries": 16385}, "16385 blocks are above 16384"),
        ({"queries": 2**21, "batch": 2**10}, "4294967296 selections are above 1073741824"),
    ],
)
def test_refusals_say_why(changes, reason):
    call, _ = shapes_of(**{"queries": 64, "entries": 32, "heads": 4, "key_heads": 2, "size": 64, **changes})
    found = capability.supports_forward(call, H100)
    assert found == reason if reason is None else found.startswith(reason)
