"""`grouped_matmul` on Hopper without one: the schedule, numbers in Mosaic GPU's interpreter, and lowering for `cuda`."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.grouped_matmul import reference
from ejkernel.operations.grouped_matmul.groups import bounds_of
from ejkernel.operations.grouped_matmul.interface import (
    OPERATION,
    GroupedMatmulCall,
    GroupedMatmulInputs,
    GroupedMatmulOutputs,
)
from ejkernel.operations.grouped_matmul.phases import bounds_of_call
from ejkernel.plugin import Target
from ejkernel.testing.checks import matrix_of_rows, random_group_sizes, relative_error, widened
from ejkernel_pallas._jax_interpreter import gpu_races
from ejkernel_pallas.mosaic_gpu import _device
from ejkernel_pallas.mosaic_gpu.grouped_matmul import capability, config, kernel, schedule

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
if not hasattr(plgpu, "InterpretGPUParams"):
    pytest.skip(f"Mosaic GPU of jax {jax.__version__} has no interpreter", allow_module_level=True)

H200 = Target("gpu", "NVIDIA H200", "9.0")
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}
SMALL = config.Tile(128, 128, 2, l2_swizzle=2, programs=2)
PAIRED = config.Tile(128, 64, 2, l2_swizzle=1, cluster=2, programs=1)
FLAT = config.Tile(64, 128, 3, l2_swizzle=2)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""The interpreter multiplies with NumPy, which warns of the NaN in rows of no group."""
needs_cuda_part = pytest.mark.skipif(_device.version_problem() is not None, reason=str(_device.version_problem()))


def interpreted(**params):
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**params))


# The schedule


@pytest.mark.parametrize("seed", range(6))
def test_tiles_give_every_row_its_matrix_once(seed):
    rng = np.random.default_rng(seed)
    batch, rows, groups, matrices, height, l2_swizzle = 2, 333, 9, 5, 64 if seed % 2 else 16, 3
    sizes = np.stack([random_group_sizes(rng, groups, rows) for _ in range(batch)])
    offset = rng.integers(-2, groups, batch).astype(np.int32)
    bounds = bounds_of(jnp.asarray(sizes), jnp.asarray(offset), batch, rows, matrices)
    table, count = jax.jit(functools.partial(schedule.tiles_of, rows=rows, height=height, l2_swizzle=l2_swizzle))(bounds)
    table, count = np.asarray(table), int(count[0])
    assert count <= table.shape[0] == schedule.max_tiles(batch * rows, batch * (matrices + 2), height)
    got, bands = np.full(batch * rows, -2), []
    for index in range(count):
        matrix, base, start, end, first, tall = table[index]
        assert base % schedule.ROW_ALIGNMENT == 0 and 1 <= tall <= l2_swizzle and first <= index < first + tall
        low = base + (index - first) * height
        own = slice(max(low, start), min(low + height, end))
        assert own.stop > own.start and (got[own] == -2).all()
        got[own] = matrix
        bands.append((first, matrix, start))
    assert len({*bands}) == len({first for first, _, _ in bands})  # no band has rows of two groups
    wanted = [matrix_of_rows(s, o, rows, matrices) for s, o in zip(sizes, offset, strict=True)]
    wanted = [np.where(own < 0, -1, own + member * matrices) for member, own in enumerate(wanted)]
    np.testing.assert_array_equal(got, np.concatenate(wanted))


@pytest.mark.parametrize("height", [64, 128])
def test_no_sizes_need_more_tiles_than_there_are(height):
    """The worst are groups of just over whole tiles, which begin just before a multiple of 8."""
    sizes = np.array([7, *[height + 3] * 20, 1, 1, height])
    rows = int(sizes.sum())
    bounds = bounds_of(jnp.asarray(sizes[None]), None, 1, rows, len(sizes))
    table, count = schedule.tiles_of(bounds, rows, height, 8)
    assert 42 < int(count[0]) <= table.shape[0]


def test_bands_of_a_group_are_alike():
    bounds = bounds_of(jnp.asarray([[9 * 128, 0, 128]]), None, 1, 10 * 128, 3)
    table, count = schedule.tiles_of(bounds, 10 * 128, 128, 8)
    assert int(count[0]) == 10
    assert np.asarray(table)[:10, schedule.HEIGHT].tolist() == [5] * 5 + [4] * 4 + [1]
    assert np.asarray(table)[:10, schedule.FIRST].tolist() == [0] * 5 + [5] * 4 + [9]


@pytest.mark.parametrize("sizes", [(2**31 - 1, 2**31 - 1, 5), (-3, 4, 90)])
def test_sizes_that_no_call_may_have_stay_inside_the_arrays(sizes):
    bounds = np.asarray(bounds_of(jnp.asarray([sizes], jnp.int32), None, 1, 50, 3))
    assert (np.diff(bounds) >= 0).all() and bounds.min() >= 0 and bounds.max() <= 50


# Numbers


def problem(
    rows,
    inner,
    columns,
    sizes,
    *,
    dtype="bfloat16",
    transpose=False,
    offset=None,
    held=None,
    scale=None,
    row_scale=None,
    bias=False,
    existing=False,
    out=None,
    stored=None,
):
    """Arguments of the public function. Rows without a matrix hold NaN, also in the cotangent that comes with them.

    In float8, scales and biases are float32; `stored` is the dtype of rhs where it differs.
    """
    rng = np.random.default_rng(0)
    held = len(sizes) if held is None else held
    foreign = matrix_of_rows(np.array(sizes), offset or 0, rows, held) < 0
    lhs, grad = rng.standard_normal((rows, inner)), rng.standard_normal((rows, columns))
    lhs[foreign] = np.nan
    if not existing:
        grad[foreign] = np.inf
    narrow = jnp.dtype(dtype).itemsize == 1
    rhs = rng.standard_normal((held, columns, inner) if transpose else (held, inner, columns))
    rhs = rhs if narrow else rhs / inner**0.5
    arrays = {"lhs": jnp.asarray(lhs, dtype), "rhs": jnp.asarray(rhs, stored or dtype), "group_sizes": jnp.asarray(sizes)}
    dtype = "float32" if narrow else dtype
    if offset is not None:
        arrays["group_offset"] = jnp.asarray(offset)
    if scale:
        arrays["rhs_scale"] = jnp.asarray(rng.uniform(0.5, 2, (held, columns) if scale == "column" else held), dtype)
    if row_scale:
        scales = rng.uniform(0.5, 2, () if row_scale == "one" else rows)
        arrays["lhs_scale"] = jnp.asarray(np.where(foreign, np.nan, scales) if scales.ndim else scales, dtype)
    if bias:
        arrays["bias"] = jnp.asarray(rng.standard_normal((held, columns)), dtype)
    if existing:
        arrays["existing_out"] = jnp.asarray(rng.standard_normal((rows, columns)), out or dtype)
    return arrays, jnp.asarray(grad, out or dtype), {"transpose_rhs": transpose, "preferred_element_type": out}


def exact(call, inputs, grad):
    inputs = widened(inputs)
    outputs = reference.forward(call, inputs)
    return outputs.out, reference.backward(call, inputs, outputs, GroupedMatmulOutputs(widened(grad)))


def check(arrays, grad, options, tile=SMALL, outer=SMALL, *, gradients=True, **params):
    bound = OPERATION.canonicalise(**arrays, **options)
    tolerance = TOLERANCE[bound.call.preferred_element_type if bound.call.in_float8 else bound.call.lhs.dtype]
    with interpreted(**params):
        outputs = jax.jit(lambda inputs: kernel.forward(bound.call, inputs, tile))(bound.inputs)
        jax.block_until_ready(outputs)
    out, wanted = exact(bound.call, bound.inputs, grad[None])
    assert outputs.out.dtype == bound.call.preferred_element_type
    assert relative_error(outputs.out, out) < tolerance
    if not gradients:
        return
    both = config.BackwardConfig.of(tile, outer)
    with interpreted(**params):
        run = jax.jit(lambda i, o, c: kernel.backward(bound.call, i, o, c, both))
        found = jax.block_until_ready(run(bound.inputs, outputs, GroupedMatmulOutputs(grad[None])))
    moving = OPERATION.moving(bound.inputs)
    assert {name for name, value in found._asdict().items() if value is not None} == moving.keys()
    for name, value in moving.items():
        gradient = getattr(found, name)
        assert gradient.dtype == value.dtype, name
        assert relative_error(gradient, getattr(wanted, name)) < 2 * tolerance, name


MANY = (200, 128, 192, (20, 0, 77, 1, 0, 90))
"""Groups begin anywhere, tiles and steps end inside of them; 12 rows have no group."""


@pytest.mark.parametrize(
    "options",
    [
        {"transpose": True, "scale": "column", "bias": True, "dtype": "float16"},
        {"scale": "group", "offset": 2, "held": 3, "existing": True, "out": "float32"},
    ],
    ids=str,
)
def test_numbers_with_many_tiles(options):
    check(*problem(*MANY, **options))


def test_widths_and_rows_that_are_no_multiples_are_padded():
    check(*problem(77, 33, 17, (30, 1, 40), scale="column", bias=True), FLAT, gradients=False)


@pytest.mark.parametrize(
    ("tile", "outer"),
    [
        (PAIRED, config.Tile(128, 128, 2, l2_swizzle=1, cluster=2, programs=1)),
        (FLAT, config.Tile(256, 128, 2, epilogue_stages=4)),
    ],
    ids=["clusters", "flat, tall, not persistent"],
)
def test_tiles_never_change_the_numbers(tile, outer):
    check(*problem(*MANY), tile, outer)


def test_there_are_no_races():
    """Between warpgroups, and with the copy engine; edges of groups, where shared memory is rewritten, included."""
    check(*problem(150, 192, 128, (20, 0, 70, 1, 50)), detect_races=True)
    assert not gpu_races()


def test_values_of_other_groups_do_not_reach_a_result():
    """NaN in a group's own rows stays there, though tiles and steps hold rows of its neighbours."""
    arrays, grad, options = problem(90, 64, 64, (21, 30, 39))
    arrays["lhs"], grad = arrays["lhs"].at[21:51].set(jnp.nan), grad.at[21:51].set(jnp.inf)
    bound = OPERATION.canonicalise(**arrays, **options)
    both, grad = config.BackwardConfig.of(SMALL, SMALL), GroupedMatmulOutputs(grad[None])

    @jax.jit
    def run(inputs, grad):
        return kernel.forward(bound.call, inputs, SMALL).out, kernel.backward(bound.call, inputs, grad, grad, both).rhs

    with interpreted():
        out, rhs = (np.asarray(value.astype(jnp.float32))[0] for value in run(bound.inputs, grad))
    assert np.isfinite(out[:21]).all() and np.isfinite(out[51:]).all() and np.isnan(out[21:51]).all()
    assert np.isfinite(rhs[[0, 2]]).all() and np.isnan(rhs[1]).all()


def test_sums_of_float32_rows_keep_its_precision():
    """Within 2 ** -16: one part of bfloat16 would leave 2 ** -9."""
    grad = jax.random.normal(jax.random.key(0), (1, 40, 64)).at[0, 36:].set(jnp.nan)
    bounds = bounds_of(jnp.asarray([[21, 0, 15]]), None, 1, 40, 3)
    with interpreted():
        got = jax.jit(lambda grad: kernel._row_sums(grad, bounds, SMALL))(grad)
    wanted = [np.asarray(grad)[0, rows].astype(np.float64).sum(axis=0) for rows in (slice(21), slice(0), slice(21, 36))]
    assert relative_error(got[0], wanted) < 1.6e-5


def test_one_compilation_for_all_sizes():
    arrays, grad, options = problem(64, 64, 64, (10, 20, 30))
    bound = OPERATION.canonicalise(**arrays, **options)
    tracings = []

    @jax.jit
    def run(inputs):
        tracings.append(None)
        return kernel.forward(bound.call, inputs, SMALL).out

    lhs = jnp.nan_to_num(bound.inputs.lhs)
    with interpreted():
        for sizes in ((10, 20, 30), (0, 64, 0), (0, 0, 0)):
            inputs = bound.inputs._replace(lhs=lhs, group_sizes=jnp.asarray([sizes], jnp.int32))
            assert relative_error(run(inputs), exact(bound.call, inputs, grad[None])[0]) < TOLERANCE["bfloat16"], sizes
    assert len(tracings) == 1


@pytest.mark.parametrize("mapped", [("lhs", "group_sizes", "rhs_scale", "bias")], ids=["all but rhs"])
def test_a_batch_shares_what_is_not_mapped(mapped):
    arrays, grad, options = problem(24, 64, 64, (11, 0, 9), scale="column", bias=True)
    arrays["lhs"] = jnp.nan_to_num(arrays["lhs"])
    stacked = {
        name: jnp.stack([value, value + 1 if name == "group_sizes" else 1.5 * value]) if name in mapped else value[None]
        for name, value in arrays.items()
    }
    bound = OPERATION.canonicalise(**arrays, **options)
    inputs = bound.inputs._replace(**stacked)
    specs = {name: ArraySpec.of(value) for name, value in inputs._asdict().items() if value is not None}
    call = GroupedMatmulCall(**specs, preferred_element_type="bfloat16")
    grads = jnp.stack([jnp.nan_to_num(grad, posinf=1), jnp.cos(jnp.nan_to_num(grad, posinf=1))])
    out, wanted = exact(call, inputs, grads)
    with interpreted():
        got = jax.jit(lambda i: kernel.forward(call, i, SMALL))(inputs)
        run = jax.jit(lambda i, o, c: kernel.backward(call, i, o, c, config.BackwardConfig.of(SMALL, SMALL)))
        found = run(inputs, got, GroupedMatmulOutputs(grads))
    assert relative_error(got.out, out) < TOLERANCE["bfloat16"]
    for name in ("lhs", "rhs", "rhs_scale", "bias"):
        assert relative_error(getattr(found, name), getattr(wanted, name)) < 2 * TOLERANCE["bfloat16"], name


# Programs


def loss_and_gradients(names, options):
    def run(values):
        def out(moving):
            return ejkernel.grouped_matmul(**{**values, **moving}, platform="pallas", **options)

        result, pullback = jax.vjp(out, {name: values[name] for name in names})
        return result, pullback(jnp.cos(result))[0]

    return run


def lowered(function, *values):
    with ejkernel.use(target=H200):
        return jax.jit(function).trace(*values).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


@needs_cuda_part
@pytest.mark.parametrize(("scale", "transpose", "dtype"), [(None, False, "bfloat16"), ("column", True, "float16")])
def test_lowers_for_cuda(scale, transpose, dtype):
    """One kernel for the product and for each gradient; the rows and the widths of models need no padding."""
    arrays, _, options = problem(1024, 512, 768, (400, 300, 324), dtype=dtype, transpose=transpose, scale=scale)
    names = [name for name in ("lhs", "rhs", "rhs_scale") if name in arrays]
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    text = lowered(loss_and_gradients(names, options), shapes)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3
    assert "ejkernel.grouped_matmul[pallas.mosaic_gpu]" in text
    wide = rf"stablehlo\.pad .*-> tensor<(1024x\d+|3x\d+x\d+)x{'bf16' if dtype == 'bfloat16' else 'f16'}>"
    assert not re.search(wide, text)


def a_call(rows=8192, inner=4096, columns=14336, groups=8, dtype="bfloat16", **changes):
    specs = {
        "lhs": ArraySpec((1, rows, inner), dtype),
        "rhs": ArraySpec((1, groups, inner, columns), dtype),
        "group_sizes": ArraySpec((1, groups), "int32"),
        "preferred_element_type": dtype,
    }
    return GroupedMatmulCall(**{**specs, **changes})


@needs_cuda_part
@pytest.mark.parametrize("index", range(2))
def test_configs_of_the_search_space_lower(index):
    """One in eight each; what does not fit shared memory, or has no layout, fails here."""
    call = a_call(2048, 1024, 1536, 4)
    shapes = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in (call.lhs, call.rhs, call.group_sizes)]
    grad = jax.ShapeDtypeStruct((1, 2048, 1536), jnp.bfloat16)

    def run(lhs, rhs, sizes, grad):
        inputs = GroupedMatmulInputs(lhs, rhs, sizes)
        outs = [kernel.forward(call, inputs, tile).out for tile in config.forward_space(call, H200)[index::8]]
        bounds = bounds_of_call(call, inputs)
        tiles = list(dict.fromkeys(both.tile_of_rhs for both in config.backward_space(call, H200)))[index::8]
        return outs, [kernel.gradients_of_matrices(call, inputs, bounds, grad, tile) for tile in tiles]

    text = lowered(run, *shapes, grad)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") >= 2


@needs_cuda_part
def test_shard_map_checks_varying_axes():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradients(lhs, rhs, sizes):
        out, pullback = jax.vjp(lambda lhs, rhs: ejkernel.grouped_matmul(lhs, rhs, sizes[0], platform="pallas"), lhs, rhs)
        return out, *pullback(out)

    specs = (spec("data"), spec(), spec("data"))
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(spec("data"), spec("data"), spec()))
    shapes = ((64, 128), jnp.bfloat16), ((2, 128, 128), jnp.bfloat16), ((1, 2), jnp.int32)
    text = lowered(sharded, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3
    assert "all_reduce" in text


# What is refused, and which tiles are taken


def test_supports_refuses_with_numbers():
    def ask(target=H200, **changes):
        with interpreted():
            return capability.supports_forward(a_call(**changes), target)

    assert ask() is None
    assert ask(inner=33, columns=17) is None
    assert "needs an NVIDIA GPU" in ask(Target("tpu", "TPU v6 lite"))
    assert "has 10.0" in ask(Target("gpu", "NVIDIA B200", "10.0"))
    assert "lhs is float32" in ask(dtype="float32")
    assert "rhs is int8" in ask(rhs=ArraySpec((1, 8, 4096, 14336), "int8"))
    assert "lhs is bfloat16 and rhs float16" in ask(rhs=ArraySpec((1, 8, 4096, 14336), "float16"))
    assert "rhs_scale is float64" in ask(rhs_scale=ArraySpec((1, 8, 1), "float64"))
    assert "bias is float64" in ask(bias=ArraySpec((1, 8, 14336), "float64"))
    assert "preferred_element_type is float64" in ask(preferred_element_type="float64")
    assert "steps, more than 2147418112" in ask(rows=2**24)


def test_every_config_fits():
    """By the model of shared memory and of registers; `Tile` refuses what has too many sums."""
    for shape in ((8192, 4096, 14336, 8), (3, 100, 7, 12), (131072, 2048, 768, 128), (64, 2048, 64, 2)):
        call = a_call(*shape)
        forward, backward = config.forward_space(call, H200), config.backward_space(call, H200)
        assert config.forward_heuristic(call, H200) == forward[0]
        assert config.backward_heuristic(call, H200) == backward[0]
        assert len(forward) > 8
        for tile in (*forward, *(t for both in backward for t in (both.tile_of_lhs, both.tile_of_rhs))):
            assert tile.shared_memory <= _device.SHARED_MEMORY, tile


def test_small_groups_get_low_tiles_and_narrow_results_narrow_ones():
    assert config.forward_heuristic(a_call(), H200).block_m == 128
    assert config.forward_heuristic(a_call(rows=64), H200).block_m == 64
    assert config.forward_heuristic(a_call(columns=128), H200).block_n == 128
    assert config.forward_heuristic(a_call(columns=576), H200).block_n == 192
    assert config.forward_heuristic(a_call(columns=768), H200).block_n == 256


def test_config_names_a_bad_tile():
    with pytest.raises(ValueError, match=r"block_m: got 96, expected one of \(64, 128, 256\)"):
        config.Tile(96, 128, 2)
    with pytest.raises(ValueError, match="at most 16384 elements"):
        config.Tile(256, 256, 2)
    with pytest.raises(ValueError, match="whole 64 columns"):
        config.Tile(64, 192, 2)
    with pytest.raises(ValueError, match="128 or 256 rows and columns"):
        config.BackwardConfig.of(SMALL, FLAT)
