"""`grouped_matmul` on TPU without one: the schedule, numbers under Pallas's TPU interpreter, and lowering for `tpu`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import interpreted

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.grouped_matmul import reference
from ejkernel.operations.grouped_matmul.interface import (
    OPERATION,
    GroupedMatmulCall,
    GroupedMatmulOutputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import matrix_of_rows, random_group_sizes, relative_error, widened
from ejkernel.testing.problem import fields_refused
from ejkernel_pallas._plugin import ejkernel_plugin
from ejkernel_pallas.tpu.grouped_matmul import capability, config, kernel, schedule

V6E = Target("tpu", "TPU v6 lite")
KINDS = ("", "TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x")
TOLERANCE = {"float32": 5e-6, "bfloat16": 1.2e-2}
SMALL = config.Config(16, 128, 128)
SMALL_BACKWARD = config.BackwardConfig(16, 128, 128, 16, 128, 128)


# The schedule


def executed(items, count):
    return [schedule.Items(*(int(column[i]) for column in items)) for i in range(int(count))]


@pytest.mark.parametrize("seed", range(6))
def test_row_items_visit_every_tile_and_give_every_row_its_matrix(seed):
    rng = np.random.default_rng(seed)
    batch, rows, groups, matrices, height = 2, 77, 9, 5, 16
    sizes = np.stack([random_group_sizes(rng, groups, rows) for _ in range(batch)])
    offset = rng.integers(-2, groups, batch).astype(np.int32)
    build = functools.partial(schedule.row_items, batch=batch, rows=rows, matrices=matrices, height=height)
    found, count = jax.jit(build)(sizes, offset)
    items = executed(found, count)
    assert len(items) <= schedule.max_row_items(batch, rows, matrices, height) == found.tile.shape[0]
    assert [(i.member, i.tile) for i in items] == sorted((i.member, i.tile) for i in items)
    assert {(i.member, i.tile) for i in items} == {(m, t) for m in range(batch) for t in range(5)}
    got = np.full((batch, rows), -1)
    for index, item in enumerate(items):
        before, after = (items[j] if 0 <= j < len(items) else None for j in (index - 1, index + 1))
        same = [other is not None and (other.member, other.tile) == (item.member, item.tile) for other in (before, after)]
        assert item.edges == (not same[0]) + 2 * (not same[1])
        own = range(max(item.low, item.tile * height), min(item.high, (item.tile + 1) * height))
        assert (got[item.member, own.start : own.stop] == -1).all()
        got[item.member, own.start : own.stop] = item.matrix
        assert bool(own) == (item.high > item.low) and (not own or item.source == index)
        needs_base = item.edges % 2 == 1 and len(own) < height
        assert not needs_base or item.base == index
    wanted = [matrix_of_rows(s, o, rows, matrices) for s, o in zip(sizes, offset, strict=True)]
    np.testing.assert_array_equal(got, wanted)
    busy = [i for i, item in enumerate(items) if item.high > item.low]
    for index, item in enumerate(items):
        earlier = [i for i in busy if i <= index]
        assert not busy or item.source == (earlier[-1] if earlier else busy[0])
    np.testing.assert_array_equal(schedule.has_matrix(sizes, offset, rows, matrices), np.array(wanted) >= 0)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_matrix_items_visit_every_matrix_once_in_a_row(seed, shared):
    rng = np.random.default_rng(seed)
    batch, rows, groups, matrices, height = 3, 50, 7, 5, 16
    sizes = np.stack([random_group_sizes(rng, groups, rows) for _ in range(batch)])
    offset = rng.integers(-1, groups, batch).astype(np.int32)
    build = functools.partial(schedule.matrix_items, batch=batch, rows=rows, matrices=matrices, height=height, shared=shared)
    found, count = jax.jit(build)(sizes, offset)
    items = executed(found, count)
    assert len(items) <= schedule.max_matrix_items(batch, rows, matrices, height) == found.tile.shape[0]
    blocks = [item.matrix if shared else (item.member, item.matrix) for item in items]
    assert sorted({*blocks}) == list(dict.fromkeys(blocks))
    assert len({*blocks}) == matrices * (1 if shared else batch)
    for index, block in enumerate(blocks):
        first, last = index == 0 or blocks[index - 1] != block, index == len(blocks) - 1 or blocks[index + 1] != block
        assert items[index].edges == first + 2 * last
    got = np.full((batch, rows), -1)
    for item in items:
        rows_of = slice(max(item.low, item.tile * height), max(min(item.high, (item.tile + 1) * height), 0))
        assert (got[item.member, rows_of] == -1).all()
        got[item.member, rows_of] = item.matrix
    np.testing.assert_array_equal(got, [matrix_of_rows(s, o, rows, matrices) for s, o in zip(sizes, offset, strict=True)])


# Numbers: many tiles in every dimension, remainders, all options


def problem(
    rows,
    inner,
    columns,
    sizes,
    *,
    dtype="float32",
    seed=0,
    transpose=False,
    offset=None,
    held=None,
    stored=None,
    scale=None,
    bias=False,
    existing=False,
):
    """Arguments of the public function. Rows without a matrix hold NaN, also in the cotangent that comes with them."""
    rng = np.random.default_rng(seed)
    held = len(sizes) if held is None else held
    foreign = matrix_of_rows(np.array(sizes), offset or 0, rows, held) < 0
    lhs, grad = rng.standard_normal((rows, inner)), rng.standard_normal((rows, columns))
    lhs[foreign] = np.nan
    if not existing:
        grad[foreign] = np.nan
    rhs = rng.standard_normal((held, columns, inner) if transpose else (held, inner, columns)) / inner**0.5
    if stored == "int8":
        rhs = np.round(64 * rhs).clip(-127, 127)
    arrays = {"lhs": jnp.asarray(lhs, dtype), "rhs": jnp.asarray(rhs, stored or dtype), "group_sizes": jnp.asarray(sizes)}
    if offset is not None:
        arrays["group_offset"] = jnp.asarray(offset)
    if scale:
        arrays["rhs_scale"] = jnp.asarray(rng.uniform(0.5, 2, (held, columns) if scale == "column" else held), dtype)
    if bias:
        arrays["bias"] = jnp.asarray(rng.standard_normal((held, columns)), dtype)
    if existing:
        arrays["existing_out"] = jnp.asarray(rng.standard_normal((rows, columns)), dtype)
    return arrays, jnp.asarray(grad, dtype), {"transpose_rhs": transpose}


def exact(call, inputs, grad):
    inputs = widened(inputs)
    outputs = reference.forward(call, inputs)
    return outputs.out, reference.backward(call, inputs, outputs, GroupedMatmulOutputs(widened(grad)))


def check(arrays, grad, options, forward=SMALL, backward=SMALL_BACKWARD):
    bound = OPERATION.canonicalise(**arrays, **options)
    dtype = str(arrays["lhs"].dtype)
    with interpreted():
        outputs = jax.jit(lambda inputs: kernel.forward(bound.call, inputs, forward))(bound.inputs)
        run = jax.jit(lambda i, o, c: kernel.backward(bound.call, i, o, c, backward))
        found = run(bound.inputs, outputs, GroupedMatmulOutputs(grad[None]))
    out, wanted = exact(bound.call, bound.inputs, grad[None])
    assert outputs.out.dtype == bound.call.preferred_element_type
    assert relative_error(outputs.out, out) < TOLERANCE[dtype]
    moving = OPERATION.moving(bound.inputs)
    assert {name for name, value in found._asdict().items() if value is not None} == moving.keys()
    for name, value in moving.items():
        gradient = getattr(found, name)
        assert gradient.dtype == value.dtype, name
        worse = max(TOLERANCE[dtype], TOLERANCE[str(value.dtype)])
        assert relative_error(gradient, getattr(wanted, name)) < 2 * worse, name


MANY = (70, 300, 140, (20, 0, 27, 1, 0, 10))
"""Tiles of 16 rows and 128 elsewhere leave remainders everywhere; 12 rows have no group."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transpose": True},
        {"scale": "column", "bias": True, "existing": True},
        {"scale": "group", "transpose": True, "offset": 2, "held": 3},
        {"offset": 1, "held": 4, "existing": True, "dtype": "bfloat16", "scale": "column"},
        {"stored": "int8", "scale": "column", "bias": True, "dtype": "bfloat16"},
        {"stored": "float8_e5m2", "bias": True, "transpose": True, "dtype": "bfloat16"},
        {"stored": "float8_e4m3fn"},
        {"stored": "bfloat16", "offset": 4, "held": 2},
    ],
    ids=str,
)
def test_numbers_with_many_tiles(options):
    check(*problem(*MANY, **options))


@pytest.mark.parametrize("tiles", [(32, 256, 256), (80, 384, 128)])
def test_tiles_never_change_the_numbers(tiles):
    rows, inner, columns = tiles
    backward = config.BackwardConfig(rows, inner, columns, rows, columns, inner)
    check(*problem(*MANY, scale="column", bias=True, existing=True), config.Config(*tiles), backward)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 40, 0), (16, 16, 8), (0, 0, 1)])
def test_group_sizes_at_their_limits(sizes):
    check(*problem(40, 32, 20, sizes, existing=True, bias=True))


def test_one_compilation_for_all_sizes():
    arrays, grad, options = problem(64, 32, 24, (10, 20, 30))
    bound = OPERATION.canonicalise(**arrays, **options)
    tracings = []

    @jax.jit
    def run(inputs):
        tracings.append(None)
        return kernel.forward(bound.call, inputs, SMALL).out

    lhs = jnp.nan_to_num(bound.inputs.lhs)
    with interpreted():
        for sizes in ((10, 20, 30), (0, 64, 0), (0, 0, 1), (33, 0, 31)):
            inputs = bound.inputs._replace(lhs=lhs, group_sizes=jnp.asarray([sizes], jnp.int32))
            assert relative_error(run(inputs), exact(bound.call, inputs, grad[None])[0]) < TOLERANCE["float32"], sizes
    assert len(tracings) == 1


def loss_and_gradients(names, options):
    def run(values):
        def out(moving):
            return ejkernel.grouped_matmul(**{**values, **moving}, platform="pallas", **options)

        result, pullback = jax.vjp(out, {name: values[name] for name in names})
        return result, pullback(jnp.cos(result))[0]

    return run


@pytest.mark.parametrize("mapped", [("lhs",), ("lhs", "group_sizes", "rhs", "rhs_scale", "bias"), ("rhs_scale",)])
def test_vmap_shares_what_is_not_mapped(mapped):
    arrays, _, options = problem(24, 16, 24, (11, 0, 9), scale="column", bias=True)
    arrays["lhs"] = jnp.nan_to_num(arrays["lhs"])
    stacked = {
        name: jnp.stack([value, value + 1 if name == "group_sizes" else 1.5 * value]) if name in mapped else value
        for name, value in arrays.items()
    }
    run = loss_and_gradients(("lhs", "rhs", "rhs_scale", "bias"), options)
    axes = {name: 0 if name in mapped else None for name in arrays}
    with ejkernel.use(target=V6E), interpreted():
        got = jax.jit(jax.vmap(run, (axes,)))(stacked)
    for member in range(2):
        values = {name: value[member] if name in mapped else value for name, value in stacked.items()}
        bound = OPERATION.canonicalise(**values, **options)
        out, wanted = exact(bound.call, bound.inputs, np.cos(np.asarray(got[0][member], np.float64))[None])
        assert relative_error(got[0][member], out[0]) < 5e-6
        for name, gradient in got[1].items():
            assert relative_error(gradient[member], getattr(wanted, name)[0]) < 1e-5, name


# Programs


def lowered(function, *values):
    with ejkernel.use(target=V6E):
        return jax.jit(function).trace(*values).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)


@pytest.mark.parametrize(
    ("stored", "scale", "calls"), [("bfloat16", None, 3), ("float32", "column", 3), ("int8", "column", 3), ("int8", None, 2)]
)
def test_lowers_for_tpu(stored, scale, calls):
    """The gradient of an integer rhs does not exist: without a scale nothing sums over rows."""
    arrays, _, options = problem(512, 256, 384, (100, 200, 212), dtype="bfloat16", stored=stored, scale=scale)
    names = [name for name in ("lhs", "rhs", "rhs_scale") if name in arrays and (name != "rhs" or stored != "int8")]
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    text = lowered(loss_and_gradients(names, options), shapes)
    assert text.count("stablehlo.custom_call @tpu_custom_call") == calls
    assert "ejkernel.grouped_matmul[pallas.tpu]" in text


def test_shard_map_checks_varying_axes():
    mesh = jax.sharding.AbstractMesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradients(lhs, rhs, sizes):
        out, pullback = jax.vjp(lambda lhs, rhs: ejkernel.grouped_matmul(lhs, rhs, sizes[0], platform="pallas"), lhs, rhs)
        return out, *pullback(out)

    specs = (spec("data"), spec(), spec("data"))
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(spec("data"), spec("data"), spec()))
    shapes = ((64, 128), jnp.float32), ((2, 128, 128), jnp.float32), ((1, 2), jnp.int32)
    text = lowered(sharded, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 3
    assert "all_reduce" in text


# What is refused, and which tiles are taken


def a_call(rows=8192, inner=4096, columns=14336, groups=8, dtype="bfloat16", **changes):
    specs = {
        "lhs": ArraySpec((1, rows, inner), dtype),
        "rhs": ArraySpec((1, groups, inner, columns), dtype),
        "group_sizes": ArraySpec((1, groups), "int32"),
        "preferred_element_type": dtype,
    }
    return GroupedMatmulCall(**{**specs, **changes})


def test_supports_refuses_with_numbers():
    def ask(target=V6E, **changes):
        return capability.supports(a_call(**changes), target)

    assert ask() is None
    assert "the target is gpu" in ask(Target("gpu", "NVIDIA H200", "9.0"))
    assert "lhs is float16" in ask(lhs=ArraySpec((1, 8192, 4096), "float16"))
    assert "rhs is float8_e4m3fnuz" in ask(rhs=ArraySpec((1, 8, 4096, 14336), "float8_e4m3fnuz"))
    assert "rhs_scale is float64" in ask(rhs_scale=ArraySpec((1, 8, 1), "float64"))
    assert "bias is float16" in ask(bias=ArraySpec((1, 8, 14336), "float16"))
    assert "lhs is float8_e4m3fn" in ask(dtype="float8_e4m3fn", preferred_element_type="bfloat16")
    scaled = a_call(lhs_scale=ArraySpec((1, 8192, 1), "float32"))
    assert fields_refused(ejkernel_plugin(), "grouped_matmul", scaled, "tpu") == {"lhs_scale"}
    assert "existing_out is float16" in ask(existing_out=ArraySpec((1, 8192, 14336), "float16"))
    assert "preferred_element_type is float16" in ask(preferred_element_type="float16")
    assert "24584 work items, at most 24576" in ask(rows=24576 * 1024)
    assert ask(rows=24568 * 1024) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_config_fits(kind, dtype):
    """By the model of VMEM; that the model says enough is for the compiler to show, in `test_tpu_grouped_matmul_compiled`."""
    capacity = {"TPU v5 lite": 128, "TPU v6 lite": 128, "TPU v5p": 64, "TPU7x": 64}.get(kind, 16) << 20
    target, size = Target("tpu", kind), 4 if dtype == "float32" else 2
    for shape in (
        (8192, 4096, 14336, 8),
        (3, 100, 7, 12),
        (131072, 2048, 768, 128),
        (24568 * 1024, 256, 128, 8),
        (64, 1, 99999, 2),
    ):
        call = a_call(*shape, dtype, rhs_scale=ArraySpec((1, shape[3], 1), dtype))
        rows, inner, columns, _ = shape
        for chosen in config.forward_space(call, target):
            tile = chosen.tile(rows, inner, columns)
            assert config.rows_bytes(tile, size, size, size, size, existing=False) <= 0.9 * capacity
        for chosen in config.backward_space(call, target):
            tile = chosen.lhs_tile(rows, inner, columns)
            assert config.rows_bytes(tile, size, size, size, size, existing=False) <= 0.9 * capacity
            tile = chosen.rhs_tile(rows, inner, columns)
            assert config.matrices_bytes(tile, size, size, size, size, size, scaled=True) <= 0.9 * capacity
            assert schedule.max_matrix_items(1, rows, shape[3], tile.block_m) <= config.MAX_ITEMS


def test_large_matrices_stay_while_their_rows_pass():
    """With enough VMEM all of K is in one block, so that a matrix is read once for all rows of its group."""
    assert config.forward_heuristic(a_call(), V6E).block_k == 4096
    assert config.forward_heuristic(a_call(), Target("tpu", "TPU v4")).block_k < 4096
    assert config.forward_heuristic(a_call(rows=8), V6E).block_m == 16


def test_config_names_a_bad_tile():
    with pytest.raises(ValueError, match=r"block_k: got 100, expected a positive multiple of 128"):
        config.Config(16, 100, 128)
    with pytest.raises(ValueError, match=r"lhs_block_m: got 8, expected a positive multiple of 16"):
        config.BackwardConfig(8, 128, 128, 16, 128, 128)


def test_float32_is_exact_unless_less_is_asked_for():
    def precision(**changes):
        return kernel._precision(dataclasses.replace(a_call(dtype="float32"), **changes))

    assert precision() == precision(precision="high") == precision(precision="highest") == jax.lax.Precision.HIGHEST
    assert precision(precision="default") == jax.lax.Precision.DEFAULT
    assert kernel._precision(a_call()) == jax.lax.Precision.DEFAULT
