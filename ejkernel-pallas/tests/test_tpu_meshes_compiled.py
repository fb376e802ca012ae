"""Kernels over the devices of a whole topology, compiled by the TPU's compiler: what communicates, and beside what."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ejkernel
from ejkernel_pallas import _ahead_of_time as aot

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
LINE = re.compile(r"(?:ROOT )?%?([\w.-]+) = ")
CALLED = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:body|true_computation|false_computation|to_apply)=(%?[\w.-]+))")
KERNEL = re.compile(r"%(ejkernel_\w+?)(?:\.\d+)? = .*tpu_custom_call")


def compiled(devices, function, *arguments, kind=AxisType.Auto):
    """The scheduled program of arrays given as shape, dtype and spec over an axis "d" of all devices."""
    mesh = Mesh(np.array(devices), ("d",), axis_types=(kind,))
    placed = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in arguments]
    with ejkernel.use(target=devices[0]), jax.set_mesh(mesh):
        return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile().as_text()


def computations(program):
    """name -> lines, in the order in which they run."""
    found, name = {}, None
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = opened[1]
            found[name] = []
        elif line.startswith("}"):
            name = None
        elif name:
            found[name].append(line.strip())
    return found


def kernels_of(line, program):
    """Kernels that a line runs, itself or in branches and loops."""
    if kernel := KERNEL.search(line):
        return {kernel[1]}
    names = [name.strip().lstrip("%") for groups in CALLED.findall(line) for group in groups for name in group.split(",")]
    return {kernel for name in names for inner in program.get(name, ()) for kernel in kernels_of(inner, program)}


def beside_permutes(program):
    """Of each loop's body: for every permute the kernels between its start and its end."""
    program = computations(program)
    bodies = {
        name.lstrip("%") for lines in program.values() for line in lines for name in re.findall(r"body=(%?[\w.-]+)", line)
    }
    found = []
    for name in bodies:
        under_way = {}
        for line in program[name]:
            assert " collective-permute(" not in line, "a permute that nothing can overlap"
            if " collective-permute-start(" in line:
                under_way[LINE.match(line)[1]] = set()
            elif ended := re.search(r" collective-permute-done\(%?([\w.-]+)\)", line):
                found.append(under_way.pop(ended[1]))
            else:
                for kernels in under_way.values():
                    kernels |= kernels_of(line, program)
    return found


def attention_gradients(**options):
    def run(query, key, value):
        def loss(*arrays):
            return jnp.sum(ejkernel.ring_attention(*arrays, causal=True, **options).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    return run


@pytest.mark.parametrize(
    ("kind", "layout"), [("v5e", "zigzag"), ("v5p", "contiguous"), ("v6e", "zigzag"), ("7x", "contiguous")]
)
def test_a_ring_sends_while_it_works(kind, layout):
    """Keys and values in forward, and in backward both and the sums of their gradients, travel beside kernels in the loops."""
    devices, spec = aot.devices_of(kind), P(None, "d")
    mesh = Mesh(np.array(devices), ("d",))
    options = {
        "mesh": mesh,
        "in_specs": (spec,) * 3,
        "out_specs": spec,
        "axis_name": "d",
        "layout": layout,
        "platform": "pallas",
    }
    shapes = [((1, 1024 * len(devices), heads, 128), jnp.bfloat16, spec) for heads in (2, 1, 1)]
    program = compiled(devices, attention_gradients(**options), *shapes)
    assert "all-gather" not in program
    beside = beside_permutes(program)
    forward = [kernels for kernels in beside if kernels == {"ejkernel_flash_attention"}]
    backward = [
        kernels for kernels in beside if kernels == {f"ejkernel_flash_attention_backward_{x}" for x in ("key", "query")}
    ]
    assert (len(forward), len(backward)) == (2, 4) and len(beside) == 6


def attention(query, key, value, **options):
    return jax.grad(lambda *arrays: jnp.sum(ejkernel.flash_attention(*arrays, causal=True, **options)), (0, 1, 2))(
        query, key, value
    )


def product(lhs, rhs, sizes, **options):
    return jax.grad(lambda *arrays: jnp.sum(ejkernel.grouped_matmul(*arrays, sizes, **options)), (0, 1))(lhs, rhs)


def norm(x, scale, **options):
    return jax.grad(lambda *arrays: jnp.sum(ejkernel.rms_norm(*arrays, **options)), (0, 1))(x, scale)


HEADS = P(None, None, "d")
PROGRAMS = {
    "attention": (attention, 3, [((1, 256, 16, 64), jnp.float32, HEADS), *[((1, 256, 8, 64), jnp.float32, HEADS)] * 2]),
    "product": (product, 2, [((256, 128), jnp.float32, P()), ((4, 128, 1024), jnp.float32, HEADS), ((4,), jnp.int32, P())]),
    "norm": (norm, 1, [((64, 8, 256), jnp.float32, P("d")), ((256,), jnp.float32, P())]),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", aot.TOPOLOGIES)
def test_an_explicit_mesh_splits_kernels(kind, name):
    """Forward of the norm and of the product is not needed for their gradients."""
    function, kernels, arguments = PROGRAMS[name]
    run = lambda *arrays: function(*arrays, platform="pallas")
    program = compiled(aot.devices_of(kind), run, *arguments, kind=AxisType.Explicit)
    assert len(re.findall('custom_call_target="tpu_custom_call"', program)) == kernels
    assert "all-gather" not in program


def test_an_auto_mesh_runs_what_xla_can_split():
    function, _, arguments = PROGRAMS["norm"]
    program = compiled(aot.devices_of("v6e"), lambda *arrays: function(*arrays, platform=("pallas", "xla")), *arguments)
    assert "tpu_custom_call" not in program and "all-reduce" in program
