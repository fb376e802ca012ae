"""Loads of bias tiles: TMA to shared memory, then to the registers of a consumer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel_pallas.mosaic_gpu._call import swizzled_smem
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import ROWS


def bias_scratch(tiles: BiasTiles) -> dict[str, Any]:
    shape = (tiles.num_stages, *tiles.shape)
    return {
        "bias": swizzled_smem(shape, tiles.dtype) if tiles.by_pair else plgpu.SMEM(shape, tiles.dtype),
        "bias_full": plgpu.Barrier(num_barriers=tiles.num_stages, num_arrivals=tiles.copies),
        "bias_empty": plgpu.Barrier(num_barriers=tiles.num_stages, num_arrivals=tiles.warpgroups),
    }


def copy_bias_tile(tiles: BiasTiles, array: Any, i_row: Any, first: Any, start: Any, s_tile: Any, barrier: Any) -> None:
    """Issue the TMA load of a tile, of owned tokens from `first` and others from `start`."""
    if not tiles.by_pair:
        source = array.at[i_row, pl.ds(first if tiles.owned else start, tiles.shape[0])]
        plgpu.copy_gmem_to_smem(source, s_tile, barrier)
        return
    for wg in range(tiles.warpgroups):
        here = (pl.ds(first + wg * ROWS, ROWS), pl.ds(start, tiles.other))
        source = array.at[i_row, *(reversed(here) if tiles.transposed else here)]
        plgpu.copy_gmem_to_smem(source, s_tile.at[wg], barrier)


def load_bias_tile(tiles: BiasTiles, s_tile: Any, i_wg: Any) -> Any:
    """A consumer's part of a tile, float32 `[ROWS, other]`."""
    layout = plgpu.Layout.WGMMA
    if tiles.by_pair:
        s_part = s_tile.at[i_wg]
        return plgpu.load(s_part.transpose((1, 0)) if tiles.transposed else s_part, layout=layout).astype(jnp.float32)
    if tiles.owned:
        s_tile = s_tile.at[pl.ds(i_wg * ROWS, ROWS)]
    b_row = plgpu.load(s_tile, layout=layout.reduce(1 if tiles.owned else 0), optimized=False)
    return lax.broadcast_in_dim(b_row, (ROWS, tiles.other), [0 if tiles.owned else 1])
