"""`grouped_matmul` in float8 on Hopper without one: numbers in Mosaic GPU's interpreter, lowering for `cuda`, refusals."""

from __future__ import annotations

import re

import jax
import pytest
from test_mosaic_gpu_grouped_matmul import (
    FLAT,
    H200,
    MANY,
    PAIRED,
    a_call,
    check,
    interpreted,
    loss_and_gradients,
    lowered,
    needs_cuda_part,
    problem,
    pytestmark,
)

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.grouped_matmul.interface import OPERATION
from ejkernel_pallas._jax_interpreter import gpu_races
from ejkernel_pallas.mosaic_gpu import _device
from ejkernel_pallas.mosaic_gpu.grouped_matmul import capability, config, kernel

__all__ = ("pytestmark",)

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
WIDE = config.Tile(128, 192, 2, l2_swizzle=2, programs=2)


@pytest.mark.parametrize(
    ("tile", "options"),
    [
        (WIDE, {"dtype": E4M3, "scale": "column", "row_scale": "row", "bias": True, "out": "float32"}),
        (FLAT, {"dtype": E5M2, "stored": E4M3, "scale": "group", "row_scale": "one", "offset": 2, "held": 3}),
        (PAIRED, {"dtype": E4M3, "existing": True, "out": "float32"}),
    ],
    ids=["scales", "one scale, mixed", "clusters, unscaled"],
)
def test_float8(tile, options):
    """Sums are exact here: the interpreter forms them in float32. Gradients of scales are sums of numbers in two bfloat16."""
    check(*problem(200, 256, 192, MANY[3], transpose=True, **options), tile, gradients="out" not in options)


def test_float8_of_any_width():
    options = {"dtype": E4M3, "scale": "column", "row_scale": "row", "bias": True, "transpose": True}
    check(*problem(77, 133, 17, (30, 1, 40), **options), FLAT)


def test_float8_has_no_races():
    """With a program for each tile: the interpreter does not know that a group of copies is waited for before its next tile."""
    options = {"dtype": E4M3, "row_scale": "row", "transpose": True}
    each = config.Tile(128, 128, 2, l2_swizzle=2)
    check(*problem(150, 384, 128, (20, 0, 70, 1, 50), **options), each, gradients=False, detect_races=True)
    assert not gpu_races()


def test_a_tile_without_room_for_a_second_set_of_sums_is_refused():
    arrays, _, options = problem(64, 128, 256, (30, 34), dtype=E4M3, transpose=True)
    bound = OPERATION.canonicalise(**arrays, **options)
    with pytest.raises(ValueError, match="got 128 sums of a thread, expected at most 96 in float8"):
        kernel.forward(bound.call, bound.inputs, config.Tile(128, 256, 2))


@needs_cuda_part
def test_float8_lowers_for_cuda():
    """One kernel, which reads the arrays as they are; gradients take one more, two for sums of float32, one for the bias."""
    arrays, _, options = problem(
        1024, 512, 768, (400, 300, 324), dtype=E4M3, transpose=True, scale="column", row_scale="row", bias=True
    )
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    text = lowered(lambda values: ejkernel.grouped_matmul(**values, platform="pallas", **options), shapes)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1
    assert not re.search(r"stablehlo\.(pad|convert) .*f8E4M3FN>", text)
    text = lowered(loss_and_gradients(["rhs_scale", "lhs_scale"], options), shapes)
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 5


def test_supports_in_float8():
    def ask(**changes):
        call = a_call(**{"dtype": E4M3, "preferred_element_type": "bfloat16", **changes})
        with interpreted():
            answers = {supports(call, H200) for supports in (capability.supports_forward, capability.supports_backward)}
        (answer,) = answers
        return answer

    transposed = {"transpose_rhs": True, "rhs": ArraySpec((1, 8, 14336, 4096), E4M3)}
    assert ask(**transposed) is None
    assert ask(**{**transposed, "rhs": ArraySpec((1, 8, 14336, 4096), E5M2)}) is None
    assert "along K only; store [G, N, K] and pass transpose_rhs=True" in ask()
    rows = ArraySpec((1, 8192), "float32")
    assert ask(**transposed, lhs_scale=rows) is None
    assert "lhs_scale is float64" in ask(**transposed, lhs_scale=ArraySpec((1, 8192), "float64"))
    assert "kernels here scale rows of float8_e4m3fn or float8_e5m2 only" in ask(dtype="bfloat16", lhs_scale=rows)
    assert "lhs is bfloat16 and rhs float8_e4m3fn" in ask(lhs=ArraySpec((1, 8192, 4096), "bfloat16"))


@pytest.mark.parametrize("shape", [(8192, 4096, 14336, 8), (3, 100, 7, 12), (131072, 2048, 768, 128), (64, 2048, 64, 2)])
def test_float8_leaves_registers_for_a_second_set_of_sums(shape):
    rows, inner, columns, groups = shape
    call = a_call(*shape, E4M3, rhs=ArraySpec((1, groups, columns, inner), E4M3), transpose_rhs=True)
    tiles = config.forward_space(call, H200)
    assert config.forward_heuristic(call, H200) == tiles[0] and len(tiles) > 8
    tiles += [both.tile_of_lhs for both in config.backward_space(call, H200)]
    assert all(tile.sums <= config.MAX_PROMOTED_SUMS and tile.shared_memory <= _device.SHARED_MEMORY for tile in tiles)
    assert (tiles[0].block_m, tiles[0].block_n) == {8192: (128, 192), 131072: (128, 192)}.get(rows, (64, 128))
