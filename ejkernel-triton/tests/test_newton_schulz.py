"""`newton_schulz` in Triton on a machine without a GPU: numbers are the conformance suite's; here, tiles and machine code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.newton_schulz.cases import CASES
from ejkernel.operations.newton_schulz.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel_triton.grouped_matmul.config import Tile
from ejkernel_triton.newton_schulz import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
import triton
import triton.language as tl

from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.newton_schulz import kernel

NAMED = {case.name: case for case in CASES}
H200 = Target("gpu", "NVIDIA H200", "9.0")
TILES = (
    Tile(16, 16, 16, 4, 1),
    Tile(32, 16, 32, 4, 2),
    Tile(64, 16, 16, 4, 2),
    Tile(32, 32, 32, 4, 2, programs=3, tma=True),
    Tile(32, 16, 16, 4, 2, programs=5, tma=True),
)


def shaped(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rows", [1, 32, 72])
def test_symmetric_products(interpreted, rows, tile):
    x = shaped(3, rows, 40)
    x = x.at[1].set(jnp.nan)  # of which the other members of the batch see nothing
    exact = np.asarray(x, np.float64)
    gram = np.asarray(kernel.symmetric_product(x, tile), np.float64)
    np.testing.assert_allclose(gram, exact @ exact.swapaxes(1, 2), rtol=2**-8, atol=1e-6)
    np.testing.assert_array_equal(gram, gram.swapaxes(1, 2))
    narrow = jnp.asarray(gram, jnp.bfloat16)
    found = np.asarray(kernel.symmetric_product(narrow, tile, 0.5, -3.0), np.float64)
    np.testing.assert_allclose(found, 0.5 * gram @ gram.swapaxes(1, 2) - 3 * gram, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("tile", [*TILES, Tile(16, 64, 16, 4, 2), Tile(16, 64, 16, 4, 2, programs=2, tma=True)], ids=str)
@pytest.mark.parametrize("rows", [1, 32, 72])
def test_general_product(interpreted, rows, tile):
    left, x = shaped(3, rows, rows), shaped(3, rows, 88)
    x = x.at[1].set(jnp.nan)
    found = np.asarray(kernel.updated(left, x, tile, 3.5), np.float64)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(found, 3.5 * wide + np.asarray(left, np.float64) @ wide, rtol=2**-7, atol=0.05)


@triton.jit
def coordinates_kernel(p_number, p_row, p_column, COUNT: tl.constexpr, RATIO: tl.constexpr):
    o_number = tl.arange(0, COUNT)
    i_row, i_column = kernel.triangle_coordinate(tl.load(p_number + o_number), RATIO)
    tl.store(p_row + o_number, i_row)
    tl.store(p_column + o_number, i_column)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_tiles_are_numbered_row_by_row(interpreted, ratio):
    """Up to the largest matrix that is not refused, at both ends of a row, where a root in float32 may be off."""
    last = np.unique(np.concatenate([np.arange(1, 200), np.geomspace(200, capability.MAX_ROWS // 16, 300)]).astype(np.int64))
    ends = ratio * last * (last + 1) // 2
    ends = ends[ends < 2**31][-511:]
    numbers = np.zeros(1024, np.int32)
    numbers[: 2 * len(ends)] = np.concatenate([ends - 1, ends[:-1], [0]])
    given = jnp.asarray(numbers)
    rows, columns = (
        np.asarray(array, np.int64)
        for array in testing.interpreted_call(
            coordinates_kernel, (given,), [((1024,), jnp.int32)] * 2, grid=1, num_warps=4, COUNT=1024, RATIO=ratio
        )
    )
    np.testing.assert_array_equal(ratio * rows * (rows + 1) // 2 + columns, numbers)
    assert np.all((columns >= 0) & (columns < ratio * (rows + 1)))


def test_half_of_the_tiles():
    tile = Tile(128, 128, 64, 8, 3)
    assert config.gram_tiles(2048, tile) == 136 and config.update_tiles(2048, 2048, tile) == 256
    assert config.gram_tiles(2000, dataclasses.replace(tile, block_m=256)) == 72


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("name", ["tails", "tails-float32", "bench-24x2048x5504"])
def test_machine_code(triton_cache, name, sm):
    launches = [launch for _, launch in recorded("newton_schulz", NAMED[name], "float32", target_of(sm))]
    kernels = {launch.kernel.fn.__name__ for launch in launches}
    assert kernels == {"symmetric_product_kernel", "update_kernel"}
    for launch in {launch.identity: launch for launch in launches}.values():
        compiled = launch.compile(sm)
        assert testing.stack_bytes(compiled) <= max(8, testing.tolerated_stack()), launch.constants
        if sm == 90 and name.startswith("bench"):
            assert launch.constants["TMA"] and "wgmma" in compiled.asm["ptx"]
            assert "st.global.v4.b32" in compiled.asm["ptx"], launch.constants


def test_every_config_fits(triton_cache):
    found = {
        one.identity: one
        for _, one in recorded("newton_schulz", NAMED["bench-4096x11008"], "float32", target_of(90), space=True)
    }
    assert len(found) > 20
    for launch in found.values():
        assert testing.resources(launch.compile(90)).shared <= 227 * 1024, launch.constants


def test_what_is_refused():
    call = OPERATION.canonicalise(jnp.zeros((4, 8))).call

    def problem(shape: tuple[int, ...], target: Target = H200, dtype: str = "float32") -> str | None:
        spec = dataclasses.replace(call.x, shape=shape, dtype=dtype)
        return capability.supports_forward(dataclasses.replace(call, x=spec), target)

    assert problem((1, 4, 8)) is None
    assert "M = 1048576" in (problem((1, 2**20, 2**20)) or "")
    assert "N = 8388608" in (problem((1, 4, 2**23)) or "")
    assert "tiles" in (problem((2**20, 2**12, 2**14)) or "")
    assert "float64" in (problem((1, 4, 8), dtype="float64") or "")
    assert problem((1, 4, 8), Target("gpu", "Tesla T4", "7.5"))
    with pytest.raises(ValueError, match="gram_block_m: got 64, expected a multiple of gram_block_n 128"):
        config.Config.of(Tile(64, 128, 64, 4, 3), Tile(64, 64, 64, 4, 3))
