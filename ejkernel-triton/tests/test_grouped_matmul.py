"""`grouped_matmul` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec, named
from ejkernel.operations.grouped_matmul import reference
from ejkernel.operations.grouped_matmul.cases import CASES
from ejkernel.operations.grouped_matmul.groups import bounds_of
from ejkernel.operations.grouped_matmul.interface import (
    OPERATION,
    GroupedMatmulCall,
    GroupedMatmulInputs,
    GroupedMatmulOutputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel.testing.problem import fields_refused
from ejkernel_triton._kernel_cache import STORE, Entry, _with_scratch
from ejkernel_triton._plugin import ejkernel_plugin
from ejkernel_triton._versions import version_problem
from ejkernel_triton.grouped_matmul import capability, config, schedule

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.grouped_matmul import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not any(tag.startswith("bench") for tag in case.tags)}
POINTERS = config.Tile(16, 32, 16, 4, 2, l2_swizzle=2)
COPIES = dataclasses.replace(POINTERS, programs=3, tma=True)


def problem_of(name, dtype="float32"):
    arrays = SMALL[name].arrays(np.random.default_rng(0))
    arrays = {key: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for key, value in arrays.items()}
    bound = OPERATION.canonicalise(**arrays, **SMALL[name].options)
    return bound.call, bound.inputs


def check(call, inputs, tile, limit=1e-6):
    """Both phases against the float64 reference, by relative norm; the reference never looks at rows that hold NaN."""
    exact = reference.forward(call, widened(inputs))
    got = kernel.forward(call, inputs, tile)
    grad = jnp.asarray(np.random.default_rng(1).standard_normal(got.out.shape), got.out.dtype)
    gradients = kernel.backward(call, inputs, got, GroupedMatmulOutputs(grad), config.BackwardConfig.of(tile, tile))
    wanted = reference.backward(call, widened(inputs), exact, GroupedMatmulOutputs(np.asarray(grad, np.float64)))
    assert got.out.dtype == call.preferred_element_type
    assert set(dict(named(gradients))) == set(OPERATION.moving(inputs))
    for name, value in (("out", got.out), *named(gradients)):
        want = exact.out if name == "out" else getattr(wanted, name)
        if name != "out":
            assert value.dtype == getattr(inputs, name).dtype
        assert value.shape == want.shape
        deviation = np.linalg.norm(np.asarray(value, np.float64) - want)
        assert deviation <= limit * max(np.linalg.norm(want), 1e-30), name


@pytest.mark.parametrize("name", ["empty-groups", "last-shard-existing-out", "scale-bias", "int8", "odd-sizes", "inner-0"])
def test_numbers_through_pointers(interpreted, name):
    check(*problem_of(name), POINTERS)


@pytest.mark.parametrize(
    "name", ["skewed", "empty-groups", "transposed", "shard-of-groups", "column-scale-shard", "float8-transposed", "odd-sizes"]
)
def test_numbers_through_the_copy_engine(interpreted, name):
    """Where it cannot read the arrays, pointers do: float8 beside bfloat16, rows of 33 elements."""
    check(*problem_of(name, "bfloat16"), COPIES, 5e-3)


@pytest.mark.parametrize(
    "own", [(), ("rhs",), ("group_sizes",), ("rhs", "rhs_scale", "bias", "group_sizes", "group_offset"), ("bias",)]
)
@pytest.mark.parametrize("tile", [POINTERS, COPIES], ids=["pointers", "copies"])
def test_batch(interpreted, own, tile):
    """What vmap folds to: matrices, sizes and the rest of each member or of all."""
    rng = np.random.default_rng(2)
    dtype = "bfloat16" if tile.tma else "float32"
    members = {name: 2 if name in own else 1 for name in ("rhs", "rhs_scale", "bias", "group_sizes", "group_offset")}
    sizes = np.array([[5, 0, 21, 3], [0, 9, 2, 20]], np.int32)[: members["group_sizes"]]
    inputs = GroupedMatmulInputs(
        jnp.asarray(rng.standard_normal((2, 33, 24)), dtype),
        jnp.asarray(rng.standard_normal((members["rhs"], 2, 24, 40)), dtype),
        jnp.asarray(sizes),
        jnp.asarray([1, 2][: members["group_offset"]], jnp.int32),
        None,
        jnp.asarray(rng.uniform(0.5, 2, (members["rhs_scale"], 2, 40)), dtype),
        jnp.asarray(rng.standard_normal((members["bias"], 2, 40)), dtype),
    )
    specs = {name: ArraySpec.of(value) for name, value in named(inputs)}
    check(GroupedMatmulCall(**specs, preferred_element_type=dtype), inputs, tile, 6e-3 if tile.tma else 1e-6)


def test_tiles():
    sizes = jnp.array([[5, 0, 9, 4], [0, 1, 17, 2]], jnp.int32)
    bounds = bounds_of(sizes, jnp.array([1], jnp.int32), 2, 20, 2)
    np.testing.assert_array_equal(bounds, [[5, 5, 14], [0, 1, 18]])
    tiles = schedule.tiles_of(bounds, 20, 8)
    count = int(tiles.count[0])
    np.testing.assert_array_equal(tiles.matrix[:count], [1, 1, 2, 3, 3, 3])
    np.testing.assert_array_equal(tiles.low[:count], [5, 13, 20, 21, 29, 37])
    np.testing.assert_array_equal(tiles.high[:count], [13, 14, 21, 29, 37, 38])
    assert tiles.matrix.shape[0] == schedule.max_tiles(40, 4, 8) == 8


@pytest.mark.parametrize("offset", [-3, -1, 0, 3, 4, 2**31 - 1, -(2**31)])
def test_matrices_without_a_group_have_no_rows(offset):
    bounds = np.asarray(bounds_of(jnp.array([[2, 3, 4, 5]], jnp.int32), jnp.array([offset], jnp.int32), 1, 20, 2))
    ends = [0, 2, 5, 9, 14]
    want = [[(ends[j], ends[j + 1]) if 0 <= j < 4 else None for j in (offset, offset + 1)]]
    for j, rows in enumerate(want[0]):
        got = (bounds[0, j], bounds[0, j + 1])
        assert got == rows if rows else got[0] == got[1]


def test_sizes_that_no_call_may_have_stay_inside_of_the_array():
    """They cannot be refused under jit; what is computed for them means nothing, but nothing outside is read or written."""
    for sizes in ([7, -4, 100, 3], [2**31 - 1] * 4, [-(2**31)] * 4):
        bounds = bounds_of(jnp.array([sizes], jnp.int32), None, 1, 12, 4)
        assert (np.diff(bounds[0]) >= 0).all()
        assert int(bounds.min()) >= 0
        assert int(bounds.max()) <= 12
        tiles = schedule.tiles_of(bounds, 12, 4)
        assert int(tiles.count[0]) <= tiles.matrix.shape[0]
        assert int(tiles.high.max()) <= 12


def call_of(rows=8192, matrices=8, inner=4096, columns=14336, dtype="bfloat16", stored="", **more):
    shape = (1, matrices, columns, inner) if more.get("transpose_rhs") else (1, matrices, inner, columns)
    return GroupedMatmulCall(
        **{
            "lhs": ArraySpec((1, rows, inner), dtype),
            "rhs": ArraySpec(shape, stored or dtype),
            "group_sizes": ArraySpec((1, matrices), "int32"),
            "preferred_element_type": dtype,
            **more,
        }
    )


CALLS = [
    call_of(),
    call_of(131072, 128, 2048, 768, transpose_rhs=True),
    call_of(64, 128, 2048, 768),
    call_of(1000, 8, 4100, 1001),
    call_of(preferred_element_type="float32"),
    call_of(stored="int8", rhs_scale=ArraySpec((1, 8, 14336), "float32")),
    call_of(rhs_scale=ArraySpec((1, 8, 1), "float32")),
    call_of(dtype="float32"),
    call_of(dtype="float32", precision="high"),
    call_of(1, 1, 1, 1),
]


@pytest.mark.parametrize("version", ["8.0", "8.6", "9.0", "10.0", "12.0"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_configs_fit_the_device(call, version):
    target = Target("gpu", "", version)
    for kind in ("forward", "lhs", "rhs"):
        product = config._product_of(call, target, kind)
        tiles = config._space(product)
        assert len(set(tiles)) == len(tiles) > 0
        assert all(product.fits(tile) for tile in tiles)
        assert tiles[0] == config._heuristic(product)
        assert version == "9.0" or not any(tile.tma for tile in tiles)
    space = config.backward_space(call, target)
    assert space[0] == config.backward_heuristic(call, target)
    assert config.BackwardConfig.of(space[0].tile_of_lhs, space[0].tile_of_rhs) == space[0]


def test_tiles_are_as_high_as_a_mean_group():
    """Of all groups whose rows are there, not of those whose matrices are."""
    sizes = ArraySpec((1, 64), "int32")
    for dtype in ("bfloat16", "float32"):
        heights = [
            config.forward_heuristic(call_of(rows, 8, dtype=dtype, group_sizes=sizes), H200).block_m
            for rows in (64, 2048, 65536)
        ]
        assert heights == [16, 32, 128]


def test_tiles_that_no_kernel_can_have_are_refused():
    with pytest.raises(ValueError, match="block_n: got 48, expected a power of two"):
        config.Tile(64, 48, 32, 4, 2)
    with pytest.raises(ValueError, match="programs at least 0"):
        config.Tile(64, 64, 32, 4, 2, programs=-1)


def compilations(recorder, call, target):
    specs = ((name, getattr(call, name)) for name in GroupedMatmulInputs._fields)
    inputs = GroupedMatmulInputs(**{n: s and jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in specs})

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, outputs, config.backward_heuristic(call, target))

    jax.eval_shape(both, inputs)
    names = [compilation.kernel.fn.__name__ for compilation in recorder.compilations]
    assert names == ["grouped_matmul_kernel", "grouped_fill_kernel"] * 2 + ["grouped_outer_kernel"]
    return recorder.compilations


def test_compiles_to_the_machine_of_hopper(recorder):
    for compilation in compilations(recorder, CALLS[0], H200):
        compiled = compilation.compile(90)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack()
        ptx = compiled.asm["ptx"]
        if compilation.kernel is kernel.grouped_fill_kernel:
            assert "st.global.v4.b32" in ptx
            continue
        assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
        assert re.findall(r"wgmma\.wait_group\.sync\.aligned (\d)", ptx).count("1") == 1, (
            "products do not run behind each other"
        )
        if compilation.kernel is kernel.grouped_outer_kernel:
            assert compiled.metadata.global_scratch_size == 0
            continue
        assert "cp.async.bulk.tensor" in ptx
        assert compiled.metadata.global_scratch_size == config.SCRATCH
        parameters = len(compilation.types)
        patched = _with_scratch(ptx, compiled.metadata.name, parameters)
        own, given = (f"[{compiled.metadata.name}_param_{parameters - i}]" for i in (1, 0))
        assert ptx.count(given) == patched.count(own) == 1
        assert patched.count(given) == ptx.count(own) == 0
        with pytest.raises(RuntimeError, match=f"got {parameters + 2} parameters"):
            _with_scratch(ptx, compiled.metadata.name, parameters - 1)


def test_compiles_for_ampere(recorder):
    for compilation in compilations(recorder, CALLS[0], Target("gpu", "", "8.0")):
        compiled = compilation.compile(80)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack()
        assert compiled.metadata.global_scratch_size == 0


@needs_jax_triton
def test_lowers_for_cuda():
    def loss(lhs, rhs, sizes):
        return ejkernel.grouped_matmul(lhs, rhs, sizes, platform="triton").astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 128), (4, 128, 256))]
    with ejkernel.use(target=H200):
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays, jax.ShapeDtypeStruct((4,), "int32"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.grouped_matmul.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 5
    assert f"tensor<{5 * config.SCRATCH}xui8>" in text, "at most five tiles have no memory for their descriptors"
    stored = [Entry.load(STORE.get(path.stem) or b"") for path in STORE.folder.rglob("*.kernel")]
    through_copies = [entry for entry in stored if "cp.async.bulk.tensor" in entry.ptx]
    assert through_copies
    for entry in through_copies:
        declared = len(re.findall(rf"\.param .*{entry.name}_param_\d+", entry.ptx))
        assert entry.ptx.count(f"[{entry.name}_param_{declared - 3}]") == 1
        assert entry.ptx.count(f"[{entry.name}_param_{declared - 2}]") == 0, "the null pointer of jaxlib is read"


@needs_jax_triton
def test_supports():
    def ask(call, target=H200):
        return capability.supports_forward(call, target)

    assert ask(call_of()) is None
    assert "the target is cpu" in str(ask(call_of(), Target("cpu")))
    assert "lhs is float64" in str(ask(call_of(dtype="float64", preferred_element_type="float32")))
    assert "preferred_element_type is float64" in str(ask(call_of(preferred_element_type="float64")))
    assert "rhs is float8_e4m3b11fnuz" in str(ask(call_of(stored="float8_e4m3b11fnuz")))
    both = {"dtype": "float8_e4m3fn", "stored": "float8_e4m3fn", "preferred_element_type": "bfloat16"}
    assert "lhs is float8_e4m3fn, needs float32" in str(ask(call_of(**both)))
    scaled = dataclasses.replace(call_of(), lhs_scale=ArraySpec((1, 8, 1), "float32"))
    assert fields_refused(ejkernel_plugin(), "grouped_matmul", scaled) == {"lhs_scale"}
    assert "no float8_e4m3fn below" in str(ask(call_of(stored="float8_e4m3fn"), Target("gpu", "", "8.0")))
    assert "N = 9000000 is above" in str(ask(call_of(columns=9_000_000)))
    assert "a matrix of 65536 x 65536 elements" in str(ask(call_of(inner=65536, columns=65536)))
    assert "may need" in str(ask(call_of(rows=2**31 - 1)))
